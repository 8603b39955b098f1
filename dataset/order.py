"""The order of rows: a pure function of (seed, epoch), cut for ranks and for a resumed run."""

from collections.abc import Iterator

import numpy as np

EMPTY_ROW = -1
"""Index of a fully masked row: what a rank runs when it has no row left, so that collectives match."""


def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `num_rows` row indices, int64, that depends on nothing but the arguments."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(num_rows)


class SkipBatchSampler:
    """Micro-batches of row indices for one rank, from anywhere in an epoch.

    The rows of the epoch, in the order of (seed, epoch), are taken `batch_size * world_size` at a time; of each such
    stretch a rank takes every `world_size`-th row. The state of an epoch is therefore one number, the rows consumed by
    all ranks together, and a run of any world size can go on where one of another left off.
    All ranks yield equally many batches; one without rows left yields a batch of `EMPTY_ROW`.

    Args:
        num_rows: rows in the data set.
        batch_size: rows in a micro-batch of one rank.
        rank, world_size: which share.
        seed, epoch: what the order depends on.
        skip_rows: rows of this epoch that were consumed before, by all ranks.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        epoch: int = 0,
        skip_rows: int = 0,
    ):
        if num_rows < 0 or batch_size < 1 or world_size < 1 or seed < 0 or epoch < 0:
            raise ValueError(
                f"num_rows {num_rows}, batch_size {batch_size}, world_size {world_size}, seed {seed}, epoch {epoch}: "
                "none may be negative, sizes must be at least 1"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} ranks")
        if not 0 <= skip_rows <= num_rows:
            raise ValueError(f"cannot skip {skip_rows} rows of {num_rows}: the data has become shorter")
        self.num_rows, self.batch_size, self.rank, self.world_size = num_rows, batch_size, rank, world_size
        self.seed, self.epoch, self.skip_rows = seed, epoch, skip_rows

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.num_rows, self.seed, self.epoch)
        stretch = self.batch_size * self.world_size
        for start in range(self.skip_rows, self.num_rows, stretch):
            rows = order[start : start + stretch][self.rank :: self.world_size]
            yield rows.tolist() or [EMPTY_ROW]

    def __len__(self) -> int:
        return -(-(self.num_rows - self.skip_rows) // (self.batch_size * self.world_size))
