"""Development sessions: `nox -s verify` runs the harness, `nox -s tests` tests it, `nox -s lint` reads it."""

import nox

nox.needs_version = ">=2024.3.2"
# pip, not uv: a pip configuration that points at a local index or at a CPU build of torch is then honoured.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["verify", "tests", "lint"]


def install(session: nox.Session, requirement: str) -> None:
    """Install the checkout, editable, at the versions that constraints.txt pins."""
    session.install("--constraint", "constraints.txt", "--editable", requirement)


@nox.session
def verify(session: nox.Session) -> None:
    """Verify every kernel in kernels/; arguments after -- replace `--profile ci --device cpu`."""
    install(session, ".")
    arguments = session.posargs or ["--profile", "ci", "--device", "cpu"]
    session.run("python", "-m", "harness", "verify", *arguments)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of lastbit itself; arguments after -- go to pytest."""
    install(session, ".[dev,cluster]")
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and types."""
    install(session, ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
