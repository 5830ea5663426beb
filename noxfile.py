"""Development sessions: `nox -s verify` runs the harness, `nox -s tests` tests it, `nox -s lint` reads it.

Besides these, which every change runs: `matrix` tests other versions, `processors` other CPUs, `coverage` counts lines,
`docs` builds the site.
"""

import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.3.2"
# pip, not uv: a pip configuration that points at a local index or at a CPU build of torch is then honoured.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["verify", "tests", "lint"]

PROJECT = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]
KEEPS_COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Variables by which Python keeps what it compiles: the tests start a hundred processes that import all of lastbit."""


def install(session: nox.Session, *requirements: str) -> None:
    """Install what is required, at the versions that constraints.txt pins.

    Modules are compiled when they are imported first, which takes 5 s; to compile all of torch and pandas takes 18 s.
    """
    session.install("--no-compile", "--constraint", "constraints.txt", *requirements)


def run_tests(session: nox.Session, *program: str, **environment: str) -> None:
    """Run pytest in two processes; arguments after -- go to it."""
    command = [*(program or ["python"]), "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs]
    session.run(*command, env={**environment, **KEEPS_COMPILED})


@nox.session
def verify(session: nox.Session) -> None:
    """Verify every kernel in kernels/; arguments after -- replace `--profile ci --device cpu`."""
    install(session, "--editable", ".")
    arguments = session.posargs or ["--profile", "ci", "--device", "cpu"]
    session.run("python", "-m", "lastbit", "verify", *arguments, env=KEEPS_COMPILED)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of lastbit itself; arguments after -- go to pytest."""
    install(session, "--editable", ".[dev,cluster]")
    run_tests(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and types; beside another session, which may install lastbit at that moment."""
    extras = PROJECT["optional-dependencies"]
    tools = [requirement for requirement in extras["dev"] if not requirement.startswith("lastbit")]
    install(session, *PROJECT["dependencies"], *extras["report"], *tools)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    package = as_imported(session)
    session.run("mypy", "noxfile.py", str(package), env={"MYPYPATH": str(package.parent)})


def as_imported(session: nox.Session) -> Path:
    """Return a folder `lastbit` of links, for tools that find a package by the names of its folders, as mypy does."""
    package = Path(session.create_tmp()).resolve() / "lastbit"
    package.mkdir(exist_ok=True)
    folders = [path.resolve() for path in (*Path("harness").iterdir(), *map(Path, ("references", "cases", "reports")))]
    for link in package.iterdir():
        link.unlink()
    for folder in folders:
        if folder.suffix != ".pyc" and folder.name not in {"__pycache__", "checkout"}:
            (package / folder.name).symlink_to(folder)
    return package


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("torch", ["lowest", "newest"])
def matrix(session: nox.Session, torch: str) -> None:
    """Run the tests on each Python, with the lowest and the newest torch and Triton that pyproject.toml takes."""
    session.install("--editable", ".[dev]", *(lowest() if torch == "lowest" else ()))
    run_tests(session)


INSTRUCTIONS = {
    "avx2": ("avx2", "Haswell", "AVX2", "AVX2"),
    "avx512": ("avx512", "SkylakeX", "AVX512_CORE", "AVX512"),
}
LIBRARIES = ("ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


@nox.session
@nox.parametrize("most", list(INSTRUCTIONS))
def processors(session: nox.Session, most: str) -> None:
    """Verify and test as on a CPU whose widest vectors are these: torch and the libraries it multiplies by obey."""
    install(session, "--editable", ".[dev,cluster]")
    limits = dict(zip(LIBRARIES, INSTRUCTIONS[most], strict=True))
    # Inductor does not tell capabilities apart in its cache: docs/measurements/findings.md.
    limits |= {"TORCHINDUCTOR_CACHE_DIR": session.create_tmp(), **KEEPS_COMPILED}
    session.run("python", "-m", "lastbit", "verify", "--profile", "ci", "--device", "cpu", env=limits)
    run_tests(session, **limits)


def lowest() -> list[str]:
    """Return the lowest torch and Triton that pyproject.toml takes, as requirements."""
    bounds = (requirement.partition(";")[0] for requirement in PROJECT["dependencies"])
    return [bound.replace(">=", "==") + ".0" for bound in bounds if bound.startswith(("torch>=", "triton>="))]


@nox.session
def coverage(session: nox.Session) -> None:
    """Count the lines of harness/ and reports/ that the tests run; below the floor of pyproject.toml it fails."""
    install(session, "--editable", ".[dev,cluster]")
    session.run("coverage", "erase")
    run_tests(session, "coverage", "run")
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into site/; a link that leads nowhere, or any other warning, fails it."""
    install(session, "--editable", ".[docs]")
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"PACKAGES": str(as_imported(session).parent)})
