"""Rows of data that is not tokenised ahead: read, packed and shuffled while training runs, and resumed to the row.

The data is divided into as many lanes as the run started with ranks: by files where there are enough of them, else by
blocks of files. A lane reads its blocks in order, a chunk of about a million tokens at a time, packs the chunk as any
other data set and goes through its rows in a shuffled order. Row number g of the run is the next row of lane g modulo
the number of lanes. So all rows are a pure function of the data and the seed; where a lane stands is where its chunk
began and how many of the chunk's rows are used up, and that is all that a checkpoint holds. A resumed run reads the
chunk again. Any number of ranks can go on; one that divides the lanes reads nothing twice.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dataset.lm_dataset import DataPath, MixtureDataset, PackedDataset, collate_rows
from dataset.order import EMPTY_ROW, epoch_order, next_source
from dataset.readers import BLOCK_BYTES, HUB_PREFIX, Block, Position, TextAs, read_blocks
from dataset.selection import DataSummary
from dataset.sources import BadRows, RowReader, expand_shards, is_held_out, parse_sources, row_hash
from dataset.store import file_sample
from dataset.token_file import is_token_file
from dataset.tokenise import Say
from dataset.units import UnitBatch, UnitMaker, UnitOptions, join_batches
from dataset.workers import make_from_block

CHUNK_TOKENS = 2**20
LEAST_ROWS = 64
PREVIEW_TOKENS = 2**17
VALIDATION_ROWS = 20_000
BLOCK_ROWS = 64
BATCHES_AHEAD = 4
SURE_ROWS = 200

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass
class Cursor:
    """Where a lane stands in one source: the pass through it, the file in the pass's order, the place in the file."""

    epoch: int = 0
    file: int = 0
    position: Position = Position()


@dataclasses.dataclass
class LaneState:
    """Where a lane stands.

    Attributes:
        cursors: where its chunk began, for each source.
        given: tokens that each source gave before the chunk.
        chunk: number of the chunk.
        taken: rows of the chunk that are used up.
    """

    cursors: list[Cursor]
    given: list[int]
    chunk: int = 0
    taken: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "LaneState":
        """Undo `to_dict`."""
        cursors = [Cursor(one["epoch"], one["file"], Position(*one["position"])) for one in values["cursors"]]
        return LaneState(cursors, values["given"], values["chunk"], values["taken"])


class StreamDataset:
    """An endless stream of rows as `kind` packs them.

    Args:
        kind: PretrainDataset, MixtureDataset or SFTDataset.
        data_path: files; PATH:WEIGHT gives token shares, by default in proportion to the files' sizes.
        tokenizer: whose ids are written.
        options: how rows become units.
        loss_on: as for `MixtureDataset`.
        hold_out: keep the validation part, by the hash of rows, out of the stream.
        text_as, strict, seed, say: as for `MixtureDataset`.

    Attributes:
        preview: some of its first rows as a `PackedDataset`, the same on every rank.
        summary: a `DataSummary` of what was read so far.
    """

    def __init__(
        self,
        kind: type[MixtureDataset],
        data_path: DataPath,
        tokenizer: PreTrainedTokenizerBase,
        options: UnitOptions,
        loss_on: Literal["all", "assistant"] = "assistant",
        hold_out: bool = False,
        text_as: TextAs = "file",
        strict: bool = False,
        seed: int = 0,
        say: Say | None = print,
    ):
        self.kind, self.seed, self.hold_out, self.text_as = kind, seed, hold_out, text_as
        self.say: Say | None = None  # what the preview meets, the stream meets again
        self.max_length, self.loss_on = options.max_length, loss_on
        self.maker = UnitMaker(tokenizer, options)
        self.sources = parse_sources(data_path)
        self.files = [expand_shards(source.path) for source in self.sources]
        if token_files := [file for files in self.files for file in files if is_token_file(file)]:
            raise ValueError(f"{token_files[0]} holds tokens that are mapped as they are; leave --streaming out")
        sizes = [sum(_size(file) for file in files) for files in self.files]
        weights = [source.weight for source in self.sources]
        if None in weights:
            weights = sizes
            if 0 in sizes and len(sizes) > 1:
                raise ValueError("the size of a hub data set is not known: write PATH:WEIGHT for all of --data_path")
        self.weights = [weight or 1 for weight in weights]
        self.num_bytes = sum(sizes)
        self.bad_rows = BadRows(strict)
        self.summary = DataSummary(fingerprint=self._fingerprint())
        self.lanes: dict[int, _Lane] = {}
        self.start()
        self.preview = _Lane(self, 0, 1).rows_of_chunk(PREVIEW_TOKENS)[0]
        if self.preview is None:
            self.bad_rows.check(say)
            raise ValueError(f"{', '.join(source.path for source in self.sources)}: no usable row")
        self.bad_rows, self.say = BadRows(strict), say

    def _fingerprint(self) -> str:
        files = [[Path(file).name, *file_sample(file)] for files in self.files for file in files]
        content = [files, dataclasses.asdict(self.maker.options), self.weights, self.loss_on]
        content += [self.hold_out, self.text_as, self.seed]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def describe(self) -> str:
        """What a run says of its data before it starts."""
        count = sum(map(len, self.files))
        files, lanes = "file" if count == 1 else "files", "lane" if self.num_lanes == 1 else "lanes"
        return (
            f"a stream of {count:,} {files}, {self.num_bytes / 1e9:,.2f} GB, in {self.num_lanes} {lanes}, "
            f"rows of {self.max_length}"
        )

    def start(self, rank: int = 0, world_size: int = 1, state: dict[str, Any] | None = None) -> None:
        """Take one of `world_size` ranks, at the stream's beginning or where a run's merged states say."""
        self.rank, self.world_size = rank, world_size
        self.num_lanes = state["num_lanes"] if state else world_size
        self.row = state["row"] if state else 0
        # Of every `world_size` rows a rank takes one, always at the same place: these are the lanes that they are of.
        shared = math.gcd(world_size, self.num_lanes)
        mine = [number for number in range(self.num_lanes) if (number - self.row - rank) % shared == 0]
        self.lanes = {number: _Lane(self, number, self.num_lanes) for number in mine}
        for number, lane in self.lanes.items():
            if state:
                lane.state = LaneState.from_dict(state["lanes"][str(number)])
        self._state = self._current_state()

    def state(self) -> dict[str, Any]:
        """This rank's part of the state after the last batch that was handed out; `merge_states` puts them together."""
        return self._state

    def _current_state(self) -> dict[str, Any]:
        lanes = {str(number): lane.state.to_dict() for number, lane in self.lanes.items()}
        return {"num_lanes": self.num_lanes, "row": self.row, "lanes": lanes}

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """This rank's micro-batches, without end, made in a background thread while the last ones are trained."""
        ready: queue.Queue[tuple[Batch, dict[str, Any]] | BaseException] = queue.Queue(BATCHES_AHEAD)
        stopped = threading.Event()

        def put(item: tuple[Batch, dict[str, Any]] | BaseException) -> None:
            while not stopped.is_set():
                try:
                    return ready.put(item, timeout=0.2)
                except queue.Full:
                    continue

        def work() -> None:
            try:
                while not stopped.is_set():
                    put((self._make_batch(batch_size), self._current_state()))
            except BaseException as error:  # it belongs to whoever waits for the batch
                put(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                batch, self._state = item
                yield batch
        finally:
            stopped.set()
            thread.join()

    def _make_batch(self, batch_size: int) -> Batch:
        items = []
        for place in range(batch_size * self.world_size):
            lane = self.lanes.get((self.row + place) % self.num_lanes)
            if lane is None:
                continue
            item = lane.next_row()
            if place % self.world_size == self.rank:
                items.append(item)
        self.row += batch_size * self.world_size
        return collate_rows(items)

    def validation(self, kind: type[MixtureDataset], only: str | None = None) -> PackedDataset:
        """The held-out rows among the first 20,000 of each source."""
        batches = [self.maker.empty()]
        for source in self.sources:
            rows = itertools.islice(RowReader(source.path, text_as=self.text_as, say=None), VALIDATION_ROWS)
            held_out = [row for row in rows if is_held_out(row_hash(row.value))]
            batches.append(self.maker.make(held_out, held_out=True))
        return kind.of_batch(join_batches(batches), self.maker, only=only)

    def account(self, batch: UnitBatch) -> None:
        """Take note of rows that cannot be used: the first are named at once.

        Raises:
            ValueError: any under `strict`, or too many.
        """
        self.bad_rows.rows_read += batch.rows_read
        for bad in batch.rejected:
            self.bad_rows.reject(*bad)
            if self.say and self.bad_rows.count <= 5:
                self.say(f"{self.bad_rows.first[-1]}; the row is left out")
        if self.bad_rows.rows_read >= SURE_ROWS:
            self.bad_rows.check(None)
        self.summary.rows_read, self.summary.bad_rows = self.bad_rows.rows_read, self.bad_rows.count


class _Lane:
    """One lane of a stream."""

    def __init__(self, stream: StreamDataset, number: int, count: int):
        self.stream, self.number, self.count = stream, number, count
        self.state = LaneState([Cursor() for _ in stream.files], [0] * len(stream.files))
        self.following: LaneState | None = None
        self.rows: PackedDataset | None = None
        self.order = np.empty(0, dtype=np.int64)
        self.open: dict[int, tuple[Cursor, Iterator[Block]]] = {}
        # Small data has small blocks, so that every lane gets some.
        self.block_bytes = max(min(BLOCK_BYTES // 4, stream.num_bytes // (4 * count)), 1)

    def next_row(self) -> dict[str, torch.Tensor]:
        """The next row, or a fully masked one if nothing at all falls to this lane."""
        if self.rows is None:
            self._load()
        if self.state.taken >= len(self.order) and self.following is not None:
            self.state = self.following
            self._load()
        if not len(self.order):
            return self.stream.preview[EMPTY_ROW]
        self.state.taken += 1
        return self.rows[int(self.order[self.state.taken - 1])]

    def _load(self) -> None:
        rows, self.following = self.rows_of_chunk(CHUNK_TOKENS)
        self.rows = rows or self.stream.preview
        chunk = self.number * 2**32 + self.state.chunk
        self.order = epoch_order(0 if rows is None else len(rows), self.stream.seed, chunk)

    def rows_of_chunk(self, size: int) -> tuple[PackedDataset | None, LaneState | None]:
        """The rows of the chunk that begins at the lane's state, and the state at its end; None if there are none."""
        stream = self.stream
        state = copy.deepcopy(self.state)
        state.chunk, state.taken = state.chunk + 1, 0
        batches, tokens = [stream.maker.empty()], 0
        weights, given_at_last_end = list(stream.weights), [-1] * len(stream.weights)
        while tokens < size and any(weights):
            source = next_source(weights, state.given)
            block = self._next_block(source, state.cursors[source])
            if block is not None:
                batch = make_from_block(stream.maker, block, None if stream.hold_out else False)
                stream.account(batch)
                count = int(batch.table["length"][~batch.table["held_out"]].sum())
                tokens, state.given[source] = tokens + count, state.given[source] + count
                batches.append(batch)
            elif tokens > LEAST_ROWS * stream.max_length:
                break
            elif state.given[source] == given_at_last_end[source]:
                weights[source] = 0  # a whole pass without a token: nothing of it falls to this lane
            else:
                given_at_last_end[source] = state.given[source]
        if not tokens:
            return None, None
        return stream.kind.of_batch(join_batches(batches), stream.maker, stream.loss_on, held_out=False), state

    def _next_block(self, source: int, cursor: Cursor) -> Block | None:
        """The lane's next block of a source, the cursor moved behind it; None at the end of a pass."""
        files = self.stream.files[source]
        whole_files = len(files) >= self.count
        order = epoch_order(len(files), self.stream.seed, source * 2**32 + cursor.epoch)
        while cursor.file < len(files):
            number = int(order[cursor.file])
            if not whole_files or number % self.count == self.number:
                for block in self._blocks(source, files[number], cursor):
                    cursor.position = block.end
                    if whole_files or (number + block.start.block) % self.count == self.number:
                        self.open[source] = (copy.copy(cursor), self.open[source][1])
                        return block
            cursor.file, cursor.position = cursor.file + 1, Position()
        cursor.epoch, cursor.file = cursor.epoch + 1, 0
        return None

    def _blocks(self, source: int, file: str, cursor: Cursor) -> Iterator[Block]:
        """The blocks of a file from the cursor on: the open ones, if they stand there."""
        place, blocks = self.open.get(source, (None, iter(())))
        if place != cursor:
            blocks = read_blocks(file, self.stream.text_as, self.block_bytes, cursor.position, BLOCK_ROWS)
            self.open[source] = (copy.copy(cursor), blocks)
        return blocks


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a stream from the parts of all ranks."""
    lanes = {number: lane for state in states for number, lane in state["lanes"].items()}
    return states[0] | {"lanes": lanes}


def _size(file: str) -> int:
    return 0 if file.startswith(HUB_PREFIX) else os.path.getsize(file)
