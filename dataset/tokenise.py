"""Tokenise a source: from the cache if it is there, else on all cores, and into the cache."""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dataset.readers import HUB_PREFIX, Block, TextAs, is_text, read_blocks
from dataset.sources import FEW_DOCUMENTS, BadRows, RowReader, expand_path, split_few
from dataset.store import SourceWriter, TokenisedSource, cache_key, load_cached
from dataset.token_file import describe_token_file, is_token_file
from dataset.units import UnitBatch, UnitMaker, UnitOptions
from dataset.workers import available_cores, make_from_block, map_in_order

# Under this size, starting other processes takes longer than they save.
PARALLEL_BYTES = 16 * 2**20
QUIET_SECONDS = 2.0

Say = Callable[[str], None]


def tokenise(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    options: UnitOptions,
    split: bool = False,
    text_as: TextAs = "file",
    strict: bool = False,
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    say: Say | None = print,
) -> TokenisedSource:
    """The units of a source.

    Args:
        path: a file, folder, glob, or hub:owner/name[@split].
        tokenizer: whose ids are written.
        options: how rows become units.
        split: mark the units that belong to the validation part; see `dataset.sources.split_held_out`.
        text_as: whether a .txt file is one document or one a paragraph.
        strict: any bad row is an error.
        cache_dir: where tokenised sources are kept; None keeps this one in memory and looks for none.
        workers: processes; None takes as many as there are cores, if there is enough to do.
        say: prints a line; None for silence.

    Raises:
        ValueError: a file that cannot be read, too many bad rows, a cache folder that cannot be written.
    """
    if text_as not in ("file", "paragraph"):
        raise ValueError(f"text_as={text_as!r} must be 'file' or 'paragraph'")
    files = expand_path(path)
    folder = None
    if cache_dir is not None:
        folder = Path(cache_dir) / cache_key(files, tokenizer, options, split, text_as)
        if source := load_cached(path, folder, strict):
            source.bad_rows.check(say)
            return source
    job = _Job(path, files, tokenizer, options, split, text_as, workers, say)
    bad_rows = BadRows(strict)
    if any(is_token_file(file) for file in files):
        return _tokens_as_they_are(path, files, job.maker, split, folder)
    with SourceWriter(folder, job.maker.dtype, keep_mask=options.kinds != "document") as writer:
        for batch in job.batches():
            bad_rows.rows_read += batch.rows_read
            for bad in batch.rejected:
                bad_rows.reject(*bad)
            writer.add(batch)
            job.report(writer)
        bad_rows.check(say)
        return writer.finish(path, bad_rows)


def _tokens_as_they_are(
    path: str, files: list[str], maker: UnitMaker, split: bool, folder: Path | None
) -> TokenisedSource:
    """The documents of a .bin file, which stays where it is; only their table is cached."""
    if len(files) > 1:
        raise ValueError(f"{path} stands for {len(files)} files, .bin among them; give each .bin file by its own path")
    if maker.options.kinds not in ("document", "both"):
        raise ValueError(f"{path} holds tokens of documents; here {maker.options.kinds}s are expected")
    table = describe_token_file(files[0], maker, split)
    with SourceWriter(folder, maker.dtype, keep_mask=False, token_file=os.path.realpath(files[0])) as writer:
        writer.add(dataclasses.replace(maker.empty(), table=table, rows_read=len(table)))
        account = BadRows()
        account.rows_read = len(table)
        return writer.finish(path, account)


class _Job:
    """One source being tokenised."""

    def __init__(
        self,
        path: str,
        files: list[str],
        tokenizer: PreTrainedTokenizerBase,
        options: UnitOptions,
        split: bool,
        text_as: TextAs,
        workers: int | None,
        say: Say | None,
    ):
        self.path, self.files = path, files
        self.split, self.text_as, self.say = split, text_as, say
        self.maker = UnitMaker(tokenizer, options)
        self.sizes = [0 if file.startswith(HUB_PREFIX) else os.path.getsize(file) for file in files]
        self.done_bytes = 0.0
        if workers is None:
            # A text file is one document, whose stretches the tokenizer's own threads encode side by side.
            alone = sum(self.sizes) < PARALLEL_BYTES or all(is_text(file) and text_as == "file" for file in files)
            workers = 1 if alone else available_cores()
        self.workers = workers
        self.started = self.reported = time.perf_counter()

    def batches(self) -> Iterator[UnitBatch]:
        """Units of the source, a block at a time, in order."""
        if self.split and (few := self._few_rows()) is not None:
            yield from few
            return
        held_out = None if self.split else False
        blocks = itertools.chain.from_iterable(self._blocks(*pair) for pair in zip(self.files, self.sizes, strict=True))
        if self.workers == 1:
            yield from (make_from_block(self.maker, block, held_out) for block in blocks)
        else:
            yield from map_in_order(blocks, self.maker, held_out, self.workers)

    def _few_rows(self) -> list[UnitBatch] | None:
        """The units of both parts where the source has so few rows that hashes would not part them fairly."""
        reader = RowReader(self.files, text_as=self.text_as, say=None)
        rows = list(itertools.islice(reader, FEW_DOCUMENTS))
        if len(rows) == FEW_DOCUMENTS:
            return None
        batches = []
        for part, held_out in (("train", False), ("validation", True)):
            batches.append(self.maker.make(split_few(rows, part), held_out))
        # A document that was cut in two is still one row; bad rows are told in the order in which they stand.
        batches[1].rows_read = reader.bad_rows.rows_read - batches[0].rows_read
        bad = [(bad.path, bad.line, bad.reason) for bad in reader.bad_rows.first]
        bad += [bad for batch in batches for bad in batch.rejected]
        batches[0].rejected = sorted(bad, key=lambda row: (self.files.index(row[0]), row[1]))
        batches[1].rejected = []
        return batches

    def _blocks(self, file: str, size: int) -> Iterator[Block]:
        before = self.done_bytes
        for block in read_blocks(file, self.text_as):
            self.done_bytes = before + size * block.share
            yield block
        self.done_bytes = before + size

    def report(self, writer: SourceWriter) -> None:
        """A line of progress, if the last one is a while ago."""
        now = time.perf_counter()
        if self.say is None or now - self.reported < QUIET_SECONDS:
            return
        self.reported = now
        seconds = now - self.started
        rate = writer.num_tokens / seconds
        line = f"tokenising {self.path}: {writer.num_units:,} rows, {writer.num_tokens:,} tokens, {rate:,.0f} tokens/s"
        if share := self.done_bytes / max(sum(self.sizes), 1):
            line += f", {share:.0%}, {seconds / share - seconds:,.0f} s left"
        self.say(line)
