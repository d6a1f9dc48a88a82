"""``stepgraph plan`` and ``stepgraph explain``, from options to exit codes."""

import json
import multiprocessing
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from stepgraph.api.plan import Plan
from stepgraph.api.planner import Attempt
from stepgraph.cli import main as cli
from stepgraph.cli import plan as plan_commands
from stepgraph.cli.plans import jobs as plan_jobs
from stepgraph.cli.plans import processes as plan_processes
from stepgraph.errors import BudgetError, StepgraphError
from stepgraph.pipeline import Made
from stepgraph.planning.request import Precision
from tests.planning.plan_support import llama_plan


def run(*args):
    return CliRunner().invoke(cli.main, args)


def attempt(plan, fits=True):
    budget = 80 * 2**30 if fits else 1
    predicted = plan.predicted
    return Attempt(plan, Made(plan), predicted.peak_bytes, budget, ("activations", 5), predicted)


@pytest.fixture
def planned(monkeypatch):
    """What would have been planned; a plan that was made before is given in its place."""
    seen = []
    answers = {}

    def run_jobs(options, jobs, workers, say):
        seen.append((options, jobs))
        default = attempt(llama_plan())
        return [answers.get(job.placement, default) for job in jobs]

    monkeypatch.setattr(plan_commands, "run_jobs", run_jobs)
    return seen, answers


def test_a_plan_from_a_model_name_to_a_file_and_its_explanation(tmp_path):
    path = str(tmp_path / "plan.json")
    small = ["--seq", "32", "--batch-per-rank", "1", "--plan", "tp+zero3", "--memory", "full"]
    result = run("plan", "llama-tiny", "--mesh", "dp=2,tp=2", *small, "-o", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("llama-tiny on dp=2,tp=2 (4 ranks): tp+zero3, memory full\n")
    assert result.stderr.splitlines() == ["capture", "enumeration", "solve", "simulation"]
    plan = Plan.load(path)
    assert plan.request.batch == {"input_ids": "int64[2, 32]", "labels": "int64[2, 32]"}
    step = plan.request.step
    assert (step.precision, step.optimizer) == (Precision(torch.bfloat16), "adamw")
    explained = run("explain", path, "model.layers.2.mlp.up_proj.weight")
    assert explained.exit_code == 0 and "all_gather over dp" in explained.stdout
    overview = run("explain", path)
    assert overview.exit_code == 0 and "program step: " in overview.stdout
    misspelt = run("explain", path, "model.layers.2.mlp.up.weight")
    assert misspelt.exit_code == 2 and misspelt.stdout == ""
    assert "did you mean 'model.layers.2.mlp.up_proj.weight'" in misspelt.stderr


def test_options_and_defaults_arrive(planned):
    seen, _ = planned
    assert run("plan", "llama3-8b", "--mesh", "dp=16,tp=8").exit_code == 0
    ((options, jobs),) = seen
    assert options == plan_commands.PlanOptions("llama3-8b", ("dp=16,tp=8",))
    assert [(str(job.mesh), job.placement) for job in jobs] == [("dp=16,tp=8", "auto")]


def test_json_is_the_plan_files_object(planned, tmp_path):
    page = tmp_path / "plan.html"
    result = run("plan", "llama3-8b", "--mesh", "dp=4", "--json", "--html", str(page))
    data = json.loads(result.stdout)
    assert data == json.loads(json.dumps(llama_plan().to_json()))
    assert (
        data["predicted"]["step_ms"] > 0
        and "forward/all_gather" in data["predicted"]["collectives"]
    )
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_plans_side_by_side(planned, tmp_path):
    seen, answers = planned
    fast = llama_plan(placement="tp+ddp")
    answers |= {"tp+ddp": attempt(fast), "tp+zero1": attempt(fast, fits=False)}
    path = tmp_path / "plan.json"
    options = [
        "--mesh",
        "dp=2,tp=2",
        "--compare",
        "tp+zero3, tp+ddp,tp+zero1,auto",
        "-o",
        str(path),
    ]
    result = run("plan", "llama-tiny", *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [job.placement for job in seen[0][1]] == ["tp+zero3", "tp+ddp", "tp+zero1", "auto"]
    assert [line.split()[1] for line in lines[1:5]] == ["tp+ddp", "tp+zero3", "tp+zero3", "tp+ddp"]
    assert lines[5] == "! does not fit"
    assert Plan.load(path).placement == "tp+ddp"
    as_json = json.loads(run("plan", "llama-tiny", *options, "--json").stdout)
    assert [row["fits"] for row in as_json] == [True, True, True, False]
    assert as_json[0]["predicted"]["step_ms"] == fast.predicted.step_ms


@pytest.mark.slow
def test_meshes_side_by_side(planned):
    seen, _ = planned
    both = ["--mesh", "dp=16", "--mesh", "dp=2,tp=8"]
    assert run("plan", "llama-tiny", *both, "--compare", "zero3,tp+zero3").exit_code == 0
    assert (
        run("plan", "llama-tiny", "--mesh", "auto", "--ranks", "16", "--plan", "zero3").exit_code
        == 0
    )
    first, second = ([(str(j.mesh), j.placement) for j in jobs] for _, jobs in seen)
    assert first == [("dp=16", "zero3"), ("dp=2,tp=8", "zero3"), ("dp=2,tp=8", "tp+zero3")]
    assert ("replicate=2,shard=4,tp=2", "hsdp") in second and ("dp=2,tp=8", "zero3") in second


def test_jobs_with_one_global_batch_share_a_capture(monkeypatch):
    made = []

    class FakePlanner:
        def __init__(self, model, example, *args, **options):
            made.append(tuple(example["input_ids"].shape))

        def plan(self, mesh, placement, memory, budget, *, last):
            asked.append((str(mesh), placement, last))
            return attempt(llama_plan())

    asked, said = [], []
    monkeypatch.setattr(plan_jobs, "Planner", FakePlanner)
    named = ("auto",)
    options = plan_commands.PlanOptions(
        "llama-tiny", named, 16, seq=64, plan="zero3", memory="none"
    )
    jobs = plan_commands.list_jobs(options)
    found = plan_jobs.run_jobs(options, jobs, [plan_jobs.Here(options, print)], said.append)
    assert made == [(32, 64), (16, 64), (8, 64), (4, 64)]
    assert len(found) == len(said) == len(jobs) and " tokens/s, peak " in said[0]
    assert [row[:2] for row in asked] == [(str(job.mesh), job.placement) for job in jobs]
    assert sum(last for _, _, last in asked) == len(made)
    assert plan_commands.count_stages(jobs) == len(made) + 3 * len(jobs)


def search(monkeypatch, stored, kept, peaks):
    """``--mesh auto`` on 16 ranks with 100 bytes each: meshes in the order planned, and what is said."""
    asked, said = [], []

    class FakePlanner:
        def __init__(self, *args, **options):
            pass

        def whole_bytes(self, mesh, memory):
            assert str(mesh) == "dp=2,tp=8"  # the first to be captured: it holds least
            return stored, kept

        def plan(self, mesh, placement, memory, budget, *, last):
            asked.append(str(mesh))
            peak = peaks(mesh)
            if peak is None or peak > 100:
                error = BudgetError("too much")
                error.smallest = peak
                raise error
            plan = llama_plan(memory="full")
            largest = ("activations", 5)
            return Attempt(plan, Made(plan), peak, budget, largest, plan.predicted)

    monkeypatch.setattr(plan_jobs, "Planner", FakePlanner)
    options = plan_commands.PlanOptions(
        "llama-tiny", ("auto",), 16, seq=64, plan="auto", memory_budget="100b"
    )
    jobs = plan_commands.list_jobs(options)
    found = plan_jobs.run_jobs(options, jobs, [plan_jobs.Here(options, print)], said.append)
    return asked, said, found


def test_meshes_that_are_chosen_come_most_promising_first(monkeypatch):
    asked, said, found = search(monkeypatch, 16 * 8, 16 * 2, lambda mesh: 8 + 6 * mesh.data_size)
    # With room: least tensor parallelism first. 8 + 6 * 16 is above 100, and still tried.
    assert asked == ["dp=16", "replicate=2,shard=8", "dp=8,tp=2", "replicate=2,shard=4,tp=2",
                     "dp=4,tp=4", "replicate=2,shard=2,tp=4", "dp=2,tp=8"]  # fmt: skip
    assert len(said) == 7 and len(found) == 5 and "too much" in said[0]


def test_meshes_that_cannot_fit_are_not_planned(monkeypatch):
    # 8 + 20 * data ranks at least: dp=16 holds 328 bytes, of the 125 that a solver may hold.
    asked, said, found = search(
        monkeypatch, 16 * 8, 16 * 2 * 20, lambda mesh: 8 + 22 * mesh.data_size
    )
    assert asked[0] == "dp=2,tp=8" and "dp=16" not in asked
    assert any(line.startswith("dp=16  auto: does not fit, it holds ") for line in said)
    assert len(found) == len(asked)


def test_a_peak_goes_by_those_of_meshes_that_were_planned(monkeypatch):
    # They hold little and take much: temporaries, say. That one fits says nothing of others.
    asked, said, _ = search(monkeypatch, 16 * 8, 16 * 2 * 7, lambda mesh: 8 + 30 * mesh.data_size)
    assert {"dp=2,tp=8", "dp=4,tp=4"} <= {*asked} and "dp=8,tp=2" not in asked
    assert any("left out: by the meshes above a rank would take" in line for line in said)


def test_where_nothing_fits_the_last_error_is_raised(monkeypatch):
    with pytest.raises(BudgetError, match="too much"):
        search(monkeypatch, 16 * 8, 16 * 2, lambda mesh: None)


# -- in several processes

SMALL = ("--seq", "32", "--batch-per-rank", "1", "--plan", "tp+zero3", "--memory", "full")


def test_processes_plan_what_one_does(monkeypatch):
    asked = ["plan", "llama-tiny", "--mesh", "dp=2,tp=2", "--mesh", "dp=1,tp=4", *SMALL, "--json"]
    monkeypatch.setattr(plan_processes, "MOST", 2)
    monkeypatch.setattr(plan_processes, "cores", lambda: 2)
    several = run(*asked)
    monkeypatch.setattr(plan_processes, "MOST", 1)
    alone = run(*asked)
    assert several.exit_code == alone.exit_code == 0, several.output
    assert json.loads(several.stdout) == json.loads(alone.stdout)
    assert len(json.loads(alone.stdout)) == 2
    assert not multiprocessing.active_children()


SCRIPT = """
import sys
from stepgraph.cli import main
from stepgraph.cli.plans import processes
processes.cores = lambda: 2
sys.argv = ["stepgraph", "plan", "llama-tiny", "--mesh", "dp=2,tp=2", "--mesh", "dp=4", *OPTIONS]
main.main()
"""


def test_a_script_that_is_not_made_for_several_processes_may_plan(tmp_path):
    path = tmp_path / "script.py"
    small = ["--seq", "16", "--batch-per-rank", "1"]
    path.write_text(SCRIPT.replace("*OPTIONS", ", ".join(map(repr, small))))
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0 and "dp=2,tp=2" in ran.stdout, ran.stderr


def no_module():
    """What a factory of the user's may return."""
    return 3


class OfTwo(Exception):
    """An error that cannot be made from its message."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fails():
    raise OfTwo("this", "that")


@pytest.mark.parametrize(
    ("factory", "message"),
    [("no_module", "returned a int, not an nn.Module"), ("fails", "this and that")],
)
def test_what_a_factory_does_wrong_in_a_process_is_said(monkeypatch, factory, message):
    monkeypatch.setattr(plan_processes, "cores", lambda: 2)
    small = ["--seq", "16", "--batch-per-rank", "1"]
    meshes = ["--mesh", "dp=2,tp=2", "--mesh", "dp=4"]
    result = run("plan", f"tests.cli.test_plan:{factory}", *meshes, *small)
    assert result.exit_code != 0 and not multiprocessing.active_children()
    assert message in result.stderr + str(result.exception)


def test_a_process_that_is_ended_is_an_error_and_so_is_what_it_raises():
    options = plan_jobs.PlanOptions(
        "llama-tiny", ("dp=2,tp=2", "dp=1,tp=4"), seq=32, plan="tp+zero3"
    )
    jobs = plan_commands.list_jobs(options)
    with plan_processes.workers_for(options, jobs, print) as workers:
        if len(workers) == 1:
            pytest.skip("one core: no other process is asked")
        with pytest.raises(AttributeError):  # whatever it is, it is raised here
            workers[0].measure("no mesh")
            workers[0].result()
        for process in multiprocessing.active_children():
            process.kill()
        with pytest.raises(StepgraphError, match="has ended without an answer"):
            workers[1].begin(jobs[0], True, {})
            workers[1].result()


def test_what_does_not_fit_is_a_failure_with_its_reason(planned, tmp_path):
    _, answers = planned
    answers["zero3"] = attempt(llama_plan(), fits=False)
    path = tmp_path / "plan.json"
    given = ["plan", "llama-tiny", "--mesh", "dp=4", "--plan", "zero3", "-o", str(path)]
    result = run(*given)
    assert result.exit_code == 1 and result.stdout == "" and not path.exists()
    assert "the smallest peak is" in result.stderr and "activations take" in result.stderr
    # What was asked for in so many words is shown all the same.
    assert run(*given, "--memory", "full").exit_code == 0
    assert run(*given, "--memory", "full", "--memory-budget", "1GiB").exit_code == 1
    assert isinstance(answers["zero3"].error(), BudgetError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "h1000"], "h100"),
        (["--plan", "zero4"], "did you mean 'zero3'"),
        (["--plan", "tp+zero3"], "the mesh dp=4 lacks tp"),
        (["--compare", "zero3,zero9"], "unknown plan 'zero9'"),
        (["--memory", "some"], "unknown memory policy 'some'"),
        (["--memory", "budget:8XiB"], "its units are B, KiB"),
        (["--memory-budget", "lots"], "a memory budget is"),
        (["--ranks", "8"], "--ranks is 8"),
        (["-o", "/no/such/folder/plan.json"], "there is no folder for '/no/such/folder"),
        (["--seq", "1"], "not in the range"),
        (["--mesh", "dp=8"], "dp=4 has 4, dp=8 has 8"),
    ],
)
def test_bad_usage_is_said_before_anything_is_built(planned, options, message):
    result = run("plan", "llama-tiny", "--mesh", "dp=4", *options)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert result.stdout == "" and not planned[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3-8", "--mesh", "dp=4"], "did you mean 'llama3-8b'"),
        (["llama-tiny", "--mesh", "dpp=4"], "did you mean 'dp'"),
        (["llama-tiny", "--mesh", "auto"], "add --ranks"),
        (["llama-tiny"], "--mesh"),
        ([], "MODEL"),
    ],
)
def test_bad_models_and_meshes(planned, arguments, message):
    result = run("plan", *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_a_file_that_is_no_plan_is_a_failure(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    for arguments in (["plan.json"], ["missing.json"]):
        result = run("explain", str(tmp_path / arguments[0]))
        assert result.exit_code == 1 and "plan" in result.stderr and result.stdout == ""
