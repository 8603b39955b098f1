"""Long documents through a sliding window, so that no token is predicted from a few tokens only."""

import numpy as np
import torch
from torch.utils.data import Dataset

from dataset.lm_dataset import IGNORED_LABEL, MixtureDataset


class SlidingWindows(Dataset):
    """Documents in overlapping rows: each token counts once, in the first row that reaches it.

    A row begins `stride` tokens behind the one before it. So but for a document's first row every token is predicted
    from at least window - stride tokens before it. Rows are as long as what they hold, not packed.

    Args:
        data: whose documents and conversations are taken, whole.
        window: tokens of a row.
        stride: new tokens of a row, 1 to window - 1.

    Raises:
        ValueError: the stride is out of range.
    """

    def __init__(self, data: MixtureDataset, window: int, stride: int):
        if not 1 <= stride < window:
            raise ValueError(f"the stride {stride} must lie in 1 to {window - 1}: a row's first token is not predicted")
        self.window, self.stride = window, stride
        self.tokens, self.trained = data.units.tokens, data.units.trained
        self.starts, self.lengths = data.units.starts[data.chosen], data.units.lengths[data.chosen]
        # Rows of a document: the first window, and one for each stride that begins behind it.
        beyond = np.maximum(self.lengths - window, 0)
        self.first_rows = np.concatenate([[0], np.cumsum(1 + -(-beyond // stride))])

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        document = int(np.searchsorted(self.first_rows, index, side="right")) - 1
        number = index - int(self.first_rows[document])
        length = int(self.lengths[document])
        begin = number * self.stride
        end = min(begin + self.window, length)
        new = begin + self.window - self.stride if number else 1  # a document's first token has nothing before it
        at = int(self.starts[document])
        ids = self.tokens[at + begin : at + end].astype(np.int64)
        labels = np.full(len(ids), IGNORED_LABEL, dtype=np.int64)
        counted = self.trained[at + new : at + end]
        labels[new - begin :] = np.where(counted, ids[new - begin :], IGNORED_LABEL)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "document_ids": torch.ones(len(ids), dtype=torch.long),
        }
