"""What is trained and when, as pure functions: weighted sources, the order of rows, its cut for ranks and resume."""

from collections.abc import Iterator, Sequence

import numpy as np

EMPTY_ROW = -1
"""Index of a fully masked row: what a rank runs when it has no row left, so that collectives match."""

GROUP_ROWS = 2048
STRIP_ROWS = 64


def _generator(*seeds: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))


def epoch_order(num_rows: int, seed: int, epoch: int, lengths: np.ndarray | None = None) -> np.ndarray:
    """A permutation of `num_rows` row indices, int64, that depends on nothing but the arguments.

    Given the rows' lengths, rows of like length stand together, so that little of a padded batch is padding: random
    groups of 2,048 rows are sorted by length and cut into strips of 64, and the strips are shuffled.
    """
    order = _generator(seed, epoch).permutation(num_rows)
    if lengths is None:
        return order
    groups = [order[first : first + GROUP_ROWS] for first in range(0, num_rows, GROUP_ROWS)]
    by_length = [group[np.argsort(lengths[group], kind="stable")] for group in groups]
    strips = [group[first : first + STRIP_ROWS] for group in by_length for first in range(0, len(group), STRIP_ROWS)]
    shuffled = _generator(seed, epoch, 1).permutation(len(strips))
    return np.concatenate([np.empty(0, dtype=np.int64), *[strips[number] for number in shuffled]])


def choose_units(
    lengths: np.ndarray, source: np.ndarray, weights: Sequence[float], seed: int
) -> tuple[np.ndarray, list[float]]:
    """Which units a mixture of weighted sources holds, and how often it goes through each source.

    Weights are shares of the tokens. The mixture has as many tokens as the sources together; a source that must give
    more than it has is repeated, one that must give less is drawn from without replacement.

    Args:
        lengths: (U,) tokens of each unit.
        source: (U,) number of the source that it comes from.
        weights: one for each source, above 0; they need not add up to 1.
        seed: of the draw.

    Returns:
        (K,) indices of units, with repetitions, and the passes through each source.
    """
    sizes = np.bincount(source, weights=lengths, minlength=len(weights))
    shares = [weight / sum(weights) for weight in weights]
    passes = [float(share * sizes.sum() / size) if size else 0.0 for share, size in zip(shares, sizes, strict=True)]
    chosen = [np.empty(0, dtype=np.int64)]
    for index, times in enumerate(passes):
        members = np.flatnonzero(source == index)
        chosen += [members] * int(times)
        shuffled = _generator(seed, index).permutation(members)
        before = np.cumsum(lengths[shuffled]) - lengths[shuffled]
        chosen.append(np.sort(shuffled[before < (times % 1) * sizes[index] - 0.5]))
    return np.concatenate(chosen), passes


def next_source(weights: Sequence[float], given: Sequence[int]) -> int:
    """The source of a stream that is furthest behind its share of the tokens that were given so far."""
    total = sum(given)
    behind = [weight / sum(weights) * (total + 1) - tokens for weight, tokens in zip(weights, given, strict=True)]
    return behind.index(max(behind))


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
        lengths: (num_rows,) of the rows, to group them by; see `epoch_order`.

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
        lengths: np.ndarray | None = None,
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
        self.seed, self.epoch, self.skip_rows, self.lengths = seed, epoch, skip_rows, lengths

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.num_rows, self.seed, self.epoch, self.lengths)
        stretch = self.batch_size * self.world_size
        for start in range(self.skip_rows, self.num_rows, stretch):
            rows = order[start : start + stretch][self.rank :: self.world_size]
            yield rows.tolist() or [EMPTY_ROW]

    def __len__(self) -> int:
        return -(-(self.num_rows - self.skip_rows) // (self.batch_size * self.world_size))
