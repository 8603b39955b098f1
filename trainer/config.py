"""Settings: dataclasses that become command-line flags, in groups, with a YAML file below the flags.

Precedence, lowest first: the dataclass default, the stage's own default, `--config run.yaml`, the flag.
A user's mistake anywhere in a command is a ValueError; `user_errors` turns it into one line and exit code 2.
"""

import contextlib
import dataclasses
import difflib
import gc
import io
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from transformers import HfArgumentParser

from dataset.sources import expand_path, parse_sources

ROOT = Path(__file__).resolve().parents[1]
"""The repository's root: every default path is anchored here, never at the working directory."""


def flag(default: Any, help: str) -> Any:
    """A dataclass field that becomes the flag of the same name, with this default and line of help."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class ModelArguments:
    """What is trained. Weights of `--from_weight` bring their own shape; a flag that contradicts it is refused."""

    _argument_group_name = "model"

    preset: str = flag("auto", "size: nano, nano-moe, mini, base, base-moe, large; auto picks by device")
    hidden_size: int | None = flag(None, "width of the residual stream, over the preset's")
    num_hidden_layers: int | None = flag(None, "number of layers, over the preset's")
    use_moe: Literal[0, 1] | None = flag(None, "1: mixture of experts, 0: dense, over the preset's")
    num_experts: int | None = flag(None, "experts in each MoE layer, over the preset's")
    num_experts_per_tok: int | None = flag(None, "experts each token goes through, over the preset's")
    norm_topk_prob: Literal[0, 1] | None = flag(
        None, "1: the weights of a token's experts sum to 1 (needs two experts or more a token), over the preset's"
    )
    dropout: float | None = flag(None, "dropout probability in training (0 unless the weights say otherwise)")
    router_aux_loss_coef: float | None = flag(None, "weight of the MoE balance loss, over the preset's")
    init: Literal["induction", "normal"] = flag(
        "induction", "new weights. induction: attention starts out copying from the context; normal: random"
    )
    from_weight: str = flag(
        "none", "start from: none, a stage's name (pretrain), auto, a model folder, or a .pth state dict"
    )
    tokenizer_path: str | None = flag(
        None, "tokenizer folder; by default the starting weights' own, else model/tokenizer"
    )
    use_compile: Literal["auto", 0, 1] = flag(
        "auto", "1: torch.compile each layer; auto: on CUDA, unless the compiler is missing or fails"
    )
    activation_checkpointing: Literal[0, 1] = flag(
        0,
        "1: keep only the layers' inputs and compute the rest again in the backward pass: less memory, a third slower",
    )


@dataclasses.dataclass
class FolderChoice:
    """Which finished model is meant."""

    _argument_group_name = "model"

    weight: str = flag("full_sft", "a finished stage in --save_dir: pretrain, mid_train, full_sft or another's name")
    model_path: str | None = flag(None, "a model folder, instead of --weight")
    save_dir: str = flag(str(ROOT / "out"), "folder of finished models")
    hidden_size: int | None = flag(None, "only a model of this width; by default the newest")
    use_moe: Literal[0, 1] | None = flag(None, "1: only mixture of experts, 0: only dense; by default the newest")


@dataclasses.dataclass
class ModelChoice(FolderChoice):
    """Which finished model is talked to or judged, and where it runs."""

    device: str = flag("auto", "cpu, cuda, cuda:1, mps; auto: the best there is")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag("auto", "precision; auto: what the device has")


@dataclasses.dataclass
class DataArguments:
    """What it is trained on. Without --data_path a stage takes its part of the embedded corpus."""

    _argument_group_name = "data"

    data_path: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "jsonl, json, csv, parquet or txt files; FILE:0.7 gives a mixture weight"}
    )
    val_path: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "validation files; by default held-out rows of the training data"}
    )
    max_seq_len: int = flag(512, "window: tokens in a row")
    packing: Literal[0, 1] = flag(1, "1: several documents share a row, isolated; 0: one a row, grouped by length")
    loss_on: Literal["all", "assistant"] = flag("assistant", "which tokens of conversations are trained")
    train_on: Literal["all", "last"] = flag("all", "which assistant turns of a conversation are trained")
    reasoning: Literal["keep", "drop"] = flag("keep", "reasoning of the assistant; drop: left out")
    thinking_mix: list[float] | None = dataclasses.field(
        default=None,
        metadata={
            "help": "shares of conversations with thinking left to the model, turned on, and turned off; by default "
            "1 0 0, and 0.8 0.1 0.1 for fine-tuning on the embedded corpus"
        },
    )
    text_as: Literal["file", "paragraph"] = flag("file", "a document in a .txt file: the whole file, or each paragraph")
    dedup: Literal[0, 1] = flag(0, "1: of training rows with the same content only the first is taken")
    strict: Literal[0, 1] = flag(0, "1: any unusable row is an error; 0: up to 5 %% are reported and left out")
    streaming: Literal[0, 1] = flag(0, "1: tokenise and pack while training, for data without room on the disk")
    cache_dir: str = flag(str(ROOT / "data" / "cache"), "folder where tokenised data is kept for the next start")
    num_workers: int | None = flag(
        None,
        "processes that load rows ahead; by default 2 on CUDA, and none on a CPU, where a row costs 0.3 %% of a step",
    )


@dataclasses.dataclass
class OptimizationArguments:
    """How it is trained."""

    _argument_group_name = "optimization"

    epochs: int = flag(1, "passes over the training rows")
    max_steps: int = flag(0, "stop after this many optimizer steps; 0: as many as the epochs take")
    batch_size: int = flag(16, "rows in a micro-batch of one process")
    accumulation_steps: int = flag(1, "micro-batches in an optimizer step")
    optimizer: Literal["muon", "adamw"] = flag("muon", "muon: Muon for the matrices and AdamW for the rest")
    learning_rate: float = flag(5e-3, "peak learning rate of Muon (experts' gate and up: half), or of AdamW alone")
    embedding_learning_rate: float | None = flag(
        None,
        "peak learning rate of AdamW beside Muon for embeddings and norms (routers: a tenth); default: --learning_rate",
    )
    weight_decay: float = flag(0.1, "decay of matrices; embeddings and norms have none")
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0: no clipping")
    schedule: Literal["cosine", "wsd", "constant"] = flag(
        "cosine", "shape after warm-up; wsd: constant, then linear decay"
    )
    warmup_ratio: float = flag(0.03, "share of the steps that warm up linearly")
    decay_ratio: float = flag(0.4, "share of the steps that decay, for wsd")
    min_lr_ratio: float = flag(0.1, "end of the schedule as a share of the peak")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", "autocast precision; auto: what the device has"
    )
    device: str = flag("auto", "cpu, cuda, cuda:1, mps; auto: the best there is")
    parallel: Literal["ddp", "fsdp"] = flag(
        "ddp", "under torchrun. ddp: each rank holds the model; fsdp: each rank holds a share of it"
    )
    seed: int = flag(42, "seed of weights, data order and dropout")


@dataclasses.dataclass
class RunArguments:
    """Where results go, how often the run measures, saves and speaks."""

    _argument_group_name = "run"

    config: str | None = flag(None, "YAML file of flags; flags on the command line override it")
    save_dir: str = flag(str(ROOT / "out"), "folder of finished models")
    save_weight: str = flag("model", "name of the result: SAVE_DIR/NAME_HIDDEN[_moe]")
    checkpoint_dir: str = flag(str(ROOT / "checkpoints"), "folder of resumable checkpoints")
    from_resume: Literal[0, 1] = flag(0, "1: continue from the newest good checkpoint of this run")
    save_interval: int = flag(200, "optimizer steps between checkpoints")
    keep_last: int = flag(2, "checkpoints kept (at least two)")
    log_interval: int = flag(20, "optimizer steps between progress lines")
    eval_interval: int = flag(100, "optimizer steps between evaluations; 0: only before and after")
    eval_iters: int = flag(20, "batches of an evaluation")
    questions: str | None = flag(None, "jsonl of your own questions, asked at each evaluation (see eval/eval_llm.py)")
    eval_questions: int | None = flag(
        None, "how many, evenly from all families; by default 104 of the embedded ones, if it trains on their chats"
    )
    sample_interval: int = flag(0, "optimizer steps between sampled answers; 0: only at the end")
    save_dtype: Literal["float32", "bfloat16"] = flag("float32", "precision of the saved model")
    max_bad_steps: int = flag(20, "steps in a row without a finite gradient that end the run")
    tracker: Literal["none", "swanlab", "wandb"] = flag("none", "where metrics go besides metrics.jsonl")
    tracker_mode: Literal["offline", "local", "cloud", "disabled"] = flag(
        "offline", "the tracker's mode; only cloud uses a network"
    )
    use_wandb: Literal[0, 1] = flag(0, "1: the same as --tracker swanlab")
    wandb_project: str = flag("minimind-pipeline", "the tracker's project")


@dataclasses.dataclass
class Settings:
    """Everything a stage was told, by group. `to_dict` is what is saved beside the run.

    `stage` is a dataclass of flags that only this stage has, or None.
    """

    model: ModelArguments
    data: DataArguments
    optimization: OptimizationArguments
    run: RunArguments
    stage: Any = None

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain dict of every setting."""
        return {name: group for name, group in dataclasses.asdict(self).items() if group is not None}

    def validate(self) -> None:
        """Raise one ValueError that lists every setting out of range, by flag."""
        data, optimization, run = self.data, self.optimization, self.run
        positive = {
            "max_seq_len": data.max_seq_len,
            "batch_size": optimization.batch_size,
            "epochs": optimization.epochs,
            "accumulation_steps": optimization.accumulation_steps,
            "save_interval": run.save_interval,
            "log_interval": run.log_interval,
            "eval_iters": run.eval_iters,
            "learning_rate": optimization.learning_rate,
            "max_bad_steps": run.max_bad_steps,
        }
        not_negative = {
            "max_steps": optimization.max_steps,
            "num_workers": data.num_workers or 0,
            "grad_clip": optimization.grad_clip,
            "weight_decay": optimization.weight_decay,
            "eval_interval": run.eval_interval,
            "sample_interval": run.sample_interval,
            "eval_questions": run.eval_questions or 0,
        }
        shares = {
            "warmup_ratio": optimization.warmup_ratio,
            "decay_ratio": optimization.decay_ratio,
            "min_lr_ratio": optimization.min_lr_ratio,
        }
        problems = [f"--{name} {value} must be above 0" for name, value in positive.items() if not value > 0]
        problems += [f"--{name} {value} must not be negative" for name, value in not_negative.items() if not value >= 0]
        problems += [f"--{name} {value} must lie in [0, 1]" for name, value in shares.items() if not 0 <= value <= 1]
        if data.streaming:
            if not optimization.max_steps:
                problems.append("--streaming 1 has no end: say when to stop with --max_steps")
            unfit = {"packing": not data.packing, "dedup": data.dedup, "num_workers": data.num_workers}
            problems += [
                f"--{name} {getattr(data, name)} does not go with --streaming 1" for name in unfit if unfit[name]
            ]
        if data.max_seq_len == 1:
            problems.append("--max_seq_len 1 leaves nothing to predict; use at least 2")
        if run.keep_last < 2:
            problems.append(f"--keep_last {run.keep_last} must be at least 2, so that a damaged file has a predecessor")
        if run.tracker == "wandb" and run.tracker_mode == "local":
            problems.append("--tracker_mode local is SwanLab's; wandb knows offline, cloud and disabled")
        if not run.save_weight or "/" in run.save_weight or run.save_weight.startswith("."):
            problems.append(f"--save_weight {run.save_weight!r} must be a plain name, such as pretrain")
        raise_problems([*problems, *(self.stage.problems() if self.stage is not None else ())])


def raise_problems(problems: Sequence[str]) -> None:
    """Raise all configuration problems as one ValueError; nothing happens when there are none."""
    if problems:
        raise ValueError(problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems))


def changed_flags(arguments: Any, names: Sequence[str]) -> dict[str, Any]:
    """Those of a dataclass's flags by these names that have another value than their default."""
    default, values = type(arguments)(), {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def output_problems(output: str | None, reads: Sequence[str] = ()) -> list[str]:
    """Why a file that `--output` names should not be written, so that it shows before the work and not after it.

    Args:
        output: the file; None is no problem.
        reads: data that the command reads, as `--data_path` takes it.
    """
    if not output:
        return []
    with contextlib.suppress(ValueError):  # a path that cannot be read is named when it is
        files = [file for source in parse_sources(list(reads)) for file in expand_path(source.path)] if reads else []
        if any(Path(file).exists() and Path(file).resolve() == Path(output).resolve() for file in files):
            return [f"--output {output} is one of the files that are read"]
    path = Path(output).absolute()
    if not path.parent.is_dir():
        return [f"--output {output}: there is no such folder"]
    if path.is_dir():
        return [f"--output {output} is a folder; name a file"]
    target = path if path.exists() else path.parent
    return [] if os.access(target, os.W_OK) else [f"--output {output}: no permission to write there"]


class _Parser(HfArgumentParser):
    """HfArgumentParser that takes no abbreviations and reports a mistake in one line, naming the nearest flag."""

    def error(self, message: str) -> None:
        unknown = [word for word in message.split() if word.startswith("--")] if "unrecognized" in message else []
        hints = []
        for word in unknown:
            near = difflib.get_close_matches(word.split("=")[0], self._option_string_actions, n=1)
            hints.append(f"unknown flag {word}" + (f" (did you mean {near[0]}?)" if near else ""))
        raise ValueError("; ".join(hints or [message]) + "; --help lists every flag")


def parse_arguments(
    *dataclass_types: type,
    description: str,
    defaults: dict[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> tuple[Any, ...]:
    """Parse the command line into the given dataclasses, one instance each.

    Args:
        dataclass_types: dataclasses whose fields become flags; `_argument_group_name` names their group in --help.
        description: the first lines of --help.
        defaults: the entry's own defaults, by field name, over those of the dataclasses.
        arguments: words to parse instead of sys.argv[1:].

    Raises:
        ValueError: an unknown flag, a value of the wrong kind, an unreadable --config or an unknown key in it.
    """
    parser = _Parser(list(dataclass_types), description=description, allow_abbrev=False)
    known = {field.name for dataclass_type in dataclass_types for field in dataclasses.fields(dataclass_type)}
    unknown_defaults = set(defaults or {}) - known
    assert not unknown_defaults, f"defaults for flags that do not exist: {unknown_defaults}"
    parser.set_defaults(**(defaults or {}))
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "config" in known:
        words = _config_words(words, known) + words
    parsed, rest = parser.parse_known_args(words)
    if rest:
        parser.error("unrecognized arguments: " + " ".join(rest))
    beyond = [(name, value) for name, value in vars(parsed).items() if isinstance(value, int) and abs(value) >= 1 << 63]
    raise_problems([f"--{name} {value} is beyond 64 bits" for name, value in beyond])
    return tuple(
        dataclass_type(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(dataclass_type)})
        for dataclass_type in dataclass_types
    )


def _config_words(words: list[str], known: set[str]) -> list[str]:
    """The YAML file named by --config as command-line words, so that both are checked in the same way."""
    path = None
    for position, word in enumerate(words):
        if word == "--config" and position + 1 < len(words):
            path = words[position + 1]
        elif word.startswith("--config="):
            path = word.split("=", 1)[1]
    if path is None:
        return []
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: expected one `flag: value` a line, found {type(content).__name__}")
    # A run's saved settings are grouped; a hand-written file is flat. Both are accepted.
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(value if isinstance(value, dict) else {key: value})
    unknown = [key for key in flat if key not in known]
    if unknown:
        near = {key: difflib.get_close_matches(str(key), known, n=1) for key in unknown}
        raise ValueError(
            f"--config {path}: unknown setting "
            + ", ".join(f"{key}" + (f" (did you mean {match[0]}?)" if match else "") for key, match in near.items())
        )
    result: list[str] = []
    for key, value in flat.items():
        if value is None or key == "config":
            continue
        values = value if isinstance(value, list) else [int(value) if isinstance(value, bool) else value]
        result += [f"--{key}", *map(str, values)]
    return result


def setup_seed(seed: int) -> None:
    """Seed every random generator that training draws from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Wrap an entry's main: a ValueError or a missing file becomes one message on stderr and exit code 2.

    Only errors raised by this repository's own code are meant for users. One that comes out of a library is a check
    that we forgot: it keeps its traceback, as does everything else. Ctrl-C ends with code 130.
    """
    gc.freeze()  # what the libraries made stays for good: no collection needs to walk over it
    gc.enable()  # an entry's first lines turned it off
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has no such letter ends no run
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not innermost.is_relative_to(ROOT) or "site-packages" in innermost.parts:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    except BrokenPipeError:  # whoever read what we print has gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGINT) from None
