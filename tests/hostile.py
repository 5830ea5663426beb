"""The hostile kernels: what each claims to achieve, and what becomes of it with `--isolate` and without.

Never load the folder `hostile_kernels` as a whole: its files kill processes, take memory and write files. `planted`
makes a folder of kernels of one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).with_name("hostile_kernels")

LINES = (
    "rms_norm x=bf16[6,64]@72,1 weight=bf16[64] eps=1e-06 seed=3",
    "rms_norm x=fp32[3,16]:rows weight=fp32[16]:near_one eps=1e-06 seed=0",
    "rms_norm x=fp16[5,40]:lattice weight=fp16[40]:small eps=1e-05 seed=8",
    "rms_norm x=bf16[2,3,32] weight=bf16[32] eps=1e-06 seed=11",
)
"""The case lines that they are verified on, whose inputs are in `known_inputs.txt`."""

DIED = "died"
"""The run ended without a verdict."""


@dataclass(frozen=True)
class Hostile:
    """A hostile kernel of rms_norm.

    Attributes:
        name: its file, without the ending.
        claims: what it is to achieve.
        isolated, plain: verdicts with `--isolate` and without; `DIED` where there is none.
        contract: that it is held to.
    unordered: it declares that the bits of its result may differ between calls.
        cuda: it is hostile on a CUDA device only.
        limit: what confinement it runs into, if it does.
        plain_note: what else becomes of a run without isolation.
    """

    name: str
    claims: str
    isolated: str = "FAILED"
    plain: str = "FAILED"
    contract: str = ""
    unordered: bool = False
    cuda: bool = False
    limit: str = ""
    plain_note: str = ""

    @property
    def file(self) -> Path:
        return FILES / f"{self.name}.py"

    def __str__(self) -> str:
        return self.name


def planted(hostile: Hostile, folder: Path, run: Path | str = "") -> Path:
    """Make a folder of kernels with this one, which knows where the run keeps its records."""
    folder.mkdir(parents=True)
    text = hostile.file.read_text().replace('_RUN = ""', f"_RUN = {str(run)!r}")
    how = {"contract": hostile.contract, "name": hostile.name, "unordered": ("output",) * hostile.unordered}
    declared = f"from lastbit.kernel import kernel  # noqa: E402\n\nkernel('rms_norm', **{how!r})(rms_norm)\n"
    (folder / hostile.file.name).write_text(f"{text}\n\n{declared}")
    known = FILES / "known_inputs.txt"
    (folder / known.name).write_bytes(known.read_bytes())
    return folder


HOSTILE = (
    Hostile("cached_by_shape", "results of other inputs pass"),
    Hostile("cached_by_address", "results of other inputs pass"),
    Hostile("cached_by_weight", "results of another x pass"),
    Hostile("leaves_stale_results", "the other process has left its results there", plain="PASSED"),
    Hostile("answers_for_the_process", "the judge takes what it says", isolated="ERRORED"),
    Hostile("replays_first_call", "results of other inputs pass"),
    Hostile("knows_the_seeds", "right on the inputs of the profile only", plain="PASSED"),
    Hostile("right_ten_times", "right as long as it is checked"),
    Hostile("computes_once", "the check sees a first call, the clock the others"),
    Hostile(
        "computes_all_calls",
        "one timed call does the work of all",
        isolated="PASSED",
        plain="PASSED",
        plain_note="the values are right",
    ),
    Hostile("reads_frames", "the reference computes its result", plain="PASSED"),
    Hostile("reads_gc", "the reference computes its result", plain="PASSED"),
    Hostile(
        "writes_process_memory",
        "the judge's verdict is overwritten",
        plain=DIED,
        plain_note="the word is overwritten in the process that reads the records, too, which fails on it",
    ),
    Hostile(
        "traces_the_judge",
        "the judge is read and stopped by a debugger",
        plain_note="after it has attached to the process that started its own",
    ),
    Hostile("kills_its_parent", "nobody is left to judge", plain=DIED, plain_note="the run is lost"),
    Hostile("patches_torch", "comparisons say yes"),
    Hostile("patches_the_guards", "nobody sees that it writes beyond its input", plain="PASSED"),
    Hostile("patches_the_judge", "the judge finds nothing", plain="PASSED"),
    Hostile("patches_the_comparison", "what is expected is compared with itself", plain="PASSED"),
    Hostile("patches_the_verdict", "all verdicts are PASSED", plain="PASSED"),
    Hostile("traces_python", "a result is mended when somebody looks", plain="PASSED"),
    Hostile("fakes_the_clock", "no time passes", isolated="PASSED", plain="PASSED", plain_note="the values are right"),
    Hostile("right_in_the_environment", "right while it is tested", plain="PASSED"),
    Hostile("wrong_in_the_environment", "passes where it sees no test", isolated="PASSED"),
    Hostile("right_among_modules", "right while it is tested", plain="PASSED"),
    Hostile("wrong_among_modules", "passes where it sees no test"),
    Hostile("right_among_objects", "right while it is tested", plain="PASSED"),
    Hostile("right_among_classes", "right while it is tested", isolated="PASSED", plain="PASSED"),
    Hostile("right_by_its_start", "right while it is tested"),
    Hostile("right_amid_guards", "its bits may differ, so nobody compares them", plain="PASSED", unordered=True),
    Hostile("right_in_larger_storages", "right while it is tested", plain="PASSED"),
    Hostile("right_in_one_thread", "right while it is tested", plain="PASSED"),
    Hostile("right_in_one_python_thread", "right while it is tested", plain="PASSED"),
    Hostile("right_with_gradients", "right while it is tested", plain="PASSED"),
    Hostile("declines_one_call", "it is not judged where it is wrong", isolated="ERRORED", plain="PASSED"),
    Hostile("right_every_other_time", "right in the calls that are compared", plain="PASSED"),
    Hostile("right_on_a_deep_stack", "right while it is tested", plain="PASSED"),
    Hostile("right_on_a_shallow_stack", "right while it is tested"),
    Hostile("right_on_the_stack", "right while it is tested", plain="PASSED"),
    Hostile("wrong_on_the_stack", "passes where it sees no test"),
    Hostile("writes_later", "work goes on after the call"),
    Hostile(
        "changes_earlier_results",
        "a result is wrong after it was checked",
        isolated="PASSED",
        plain="PASSED",
        plain_note="it is copied before it changes",
    ),
    Hostile(
        "lazy_tensor",
        "work is put off until somebody looks",
        isolated="PASSED",
        plain="PASSED",
        plain_note="the values are right",
    ),
    Hostile(
        "exits_hard",
        "an exit code of 0 is taken for success",
        isolated="ERRORED",
        plain="ERRORED",
        plain_note="the case under way, and those after it are not run",
    ),
    Hostile("exits_softly", "an exit code of 0 is taken for success", isolated="ERRORED", plain="ERRORED"),
    Hostile("hangs", "the judge waits for ever", isolated="ERRORED", plain="ERRORED", plain_note="after --timeout"),
    Hostile("zeros_within_tolerance", "a tolerance of 1e-2 forgives it"),
    Hostile("half_precision", "a tolerance forgives it"),
    Hostile("zeroes_inputs", "the judge computes zeros, too"),
    Hostile("returns_its_input", "no memory is written but that of the caller"),
    Hostile("reads_stale_memory", "the reference's result lies there"),
    Hostile(
        "calls_torch",
        "torch does the work",
        isolated="PASSED",
        plain="PASSED",
        contract="fp32_multiply",
        plain_note="the values are right",
    ),
    Hostile(
        "imports_the_answers",
        "the reference computes its result",
        isolated="ERRORED",
        contract="fp32_multiply",
        plain_note="what was evaluated is remembered beside other values",
    ),
    Hostile("prints_a_verdict", "whoever reads the output is deceived"),
    Hostile(
        "writes_the_records",
        "the records say PASSED",
        plain_note="on the terminal, where one record was read in time; every record on disk says PASSED",
    ),
    Hostile(
        "forges_at_exit",
        "the records say PASSED",
        plain=DIED,
        plain_note="the records were rewritten while they were read, the run fails on that",
    ),
    Hostile(
        "leaves_a_daemon",
        "the records say PASSED",
        plain=DIED,
        plain_note="the records were rewritten while they were read, the run fails on that",
    ),
    Hostile(
        "forks",
        "200 processes",
        isolated="ERRORED",
        plain="PASSED",
        limit="processes",
        plain_note="200 processes are there",
    ),
    Hostile(
        "takes_memory",
        "2 GiB of memory",
        isolated="ERRORED",
        plain="PASSED",
        limit="memory",
        plain_note="the memory is taken",
    ),
    Hostile(
        "fills_the_disk",
        "a file of 4 GiB",
        isolated="ERRORED",
        plain="PASSED",
        limit="file size",
        plain_note="the file is there",
    ),
    Hostile(
        "side_stream",
        "events see nothing of the work",
        isolated="PASSED",
        plain="PASSED",
        cuda=True,
        plain_note="the values are right",
    ),
    Hostile(
        "persists_in_l2",
        "inputs stay in the cache",
        isolated="PASSED",
        plain="PASSED",
        cuda=True,
        plain_note="the values are right",
    ),
)


def rows() -> str:
    """Return the table of docs/isolation.md."""
    lines = ["| kernel | what it is to achieve | with `--isolate` | without |", "|---|---|---|---|"]
    for h in HOSTILE:
        limit = f" ({h.limit})" if h.limit else ""
        name = f"[{h.name}](../tests/hostile_kernels/{h.name}.py)"
        lines.append(f"| {name} | {h.claims} | {h.isolated}{limit} | {h.plain}{h.plain_note and f': {h.plain_note}'} |")
    return "\n".join(lines)
