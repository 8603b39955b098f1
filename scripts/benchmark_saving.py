"""What saving in the background costs: steps with a checkpoint being written against steps without, in one run.

Of every 40 steps the first 20 begin with a save, the other 20 have none; the share is the median over the pairs.

    python scripts/benchmark_saving.py --preset mini --pairs 5
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

from trainer.config import ROOT, flag, parse_arguments, user_errors
from trainer.data import build_pretrain_data
from trainer.distributed import init_distributed_mode
from trainer.engine import train_epoch
from trainer.losses import language_model_loss
from trainer.resume import resume
from trainer.stage import Stage, assemble, read_settings

STEPS = 20


@dataclasses.dataclass
class BenchmarkArguments:
    """What is measured."""

    _argument_group_name = "benchmark"

    preset: str = flag("mini", "size of the model")
    pairs: int = flag(5, "how often 20 steps with a save are compared with 20 without")
    save_dir: str = flag(str(ROOT / "checkpoints"), "folder on the disk that is measured")


def main() -> None:
    (options,) = parse_arguments(BenchmarkArguments, description=__doc__)
    defaults = {"max_seq_len": 256, "batch_size": 16}
    stage = Stage("benchmark", __doc__, build_pretrain_data, language_model_loss, defaults)
    steps = 2 * STEPS * (options.pairs + 1)
    Path(options.save_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.save_dir) as folder:
        words = f"--preset {options.preset} --epochs 100 --max_steps {steps + 1} --save_interval {2 * STEPS} "
        words += f"--eval_interval 0 --log_interval {STEPS} --save_dir {folder} --checkpoint_dir {folder}"
        settings = read_settings(stage, words.split())
        run, *_ = assemble(stage, settings, init_distributed_mode(settings.optimization.device))
        resume(run)
        times: list[float] = []

        def note_time() -> bool:  # asked after each step, just before it is saved
            times.append(time.perf_counter())
            return False

        run.stop_asked = note_time
        while train_epoch(run):
            pass
        run.checkpoints.writer.wait()
        size = run.checkpoints.steps()[0].stat().st_size
    # The first 40 steps warm up.
    starts = range(2 * STEPS - 1, steps - 1, 2 * STEPS)
    saving = [times[start + STEPS] - times[start] for start in starts]
    plain = [times[start + 2 * STEPS] - times[start + STEPS] for start in starts]
    shares = [with_save / without - 1 for with_save, without in zip(saving, plain, strict=True)]
    result = {
        "preset": options.preset,
        "checkpoint_mebibytes": round(size / 2**20, 1),
        "seconds_of_20_steps_with_a_save": [round(seconds, 2) for seconds in saving],
        "seconds_of_20_steps_without": [round(seconds, 2) for seconds in plain],
        "cost": [round(share, 4) for share in shares],
        "median_cost": round(statistics.median(shares), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    with user_errors():
        main()
