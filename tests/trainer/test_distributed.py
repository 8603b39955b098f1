"""Ranks: what they agree on, and how a failure of one becomes known to all."""

import json

import pytest
import torch

from tests.trainer.helpers import run_ranks
from trainer.distributed import (
    all_reduce_sum,
    any_rank,
    choose_device,
    gather_objects,
    init_distributed_mode,
    main_first,
)

CPU = torch.device("cpu")


def agree(world, folder):
    results = {
        "sum": all_reduce_sum(torch.tensor([1.0, world.rank])).tolist(),
        "any": [any_rank(world.rank == 1), any_rank(False)],
        "gathered": gather_objects({"rank": world.rank}),
        "order": main_first(lambda: sorted(path.name for path in folder.glob("seen-*")) + [_touch(folder, world.rank)]),
    }
    (folder / f"result-{world.rank}.json").write_text(json.dumps(results))


def _touch(folder, rank):
    (folder / f"seen-{rank}").touch()
    return f"seen-{rank}"


def test_two_ranks_agree(tmp_path):
    run_ranks(agree, tmp_path, tmp_path)
    first, second = (json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2))
    for result in (first, second):
        assert result["sum"] == [2.0, 1.0]
        assert result["any"] == [True, False]
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert first["order"] == ["seen-0"]  # rank 0 worked first, and alone
    assert second["order"] == ["seen-0", "seen-1"]


def fail_on_main(world, folder):
    def work():
        raise ValueError("data.jsonl:3: bad row")

    with pytest.raises(ValueError, match="data.jsonl:3: bad row"):
        main_first(work)
    (folder / f"raised-{world.rank}").touch()


def test_a_failure_on_rank_0_is_everybodys(tmp_path):
    run_ranks(fail_on_main, tmp_path, tmp_path)
    assert len(list(tmp_path.glob("raised-*"))) == 2


def test_without_torchrun_everything_is_a_no_op(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    world = init_distributed_mode("cpu")
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert gather_objects(5) == [5] and main_first(lambda: 7) == 7 and any_rank(True)


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="--device toaster: not a device"):
        choose_device("toaster")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda: not available here; this machine has: cpu"):
            choose_device("cuda")
