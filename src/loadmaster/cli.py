"""The command table, and the only place where errors become exit codes.

Exit codes: 0 fits, passed, healthy; 1 does not fit, failed, a problem was found; 2 wrong usage;
3 could not tell. Results go to stdout, all else to stderr. Everything heavy is imported when a
command runs, so that ``--help`` works at once, offline and without a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from loadmaster import __version__

if TYPE_CHECKING:
    from loadmaster.core.facts import EngineFacts, Finding, GpuFacts, LaunchArgs, LoadSheet, ModelFacts
    from loadmaster.render.paint import Paint

OK, PROBLEM, USAGE, COULD_NOT_TELL = 0, 1, 2, 3


class Failure(click.ClickException):
    """An error that a user can cause: what happened, a hint what to do, and the exit code."""

    def __init__(self, message: str, hint: str | None = None, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)


def _json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(command)


def _engine_version_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--engine-version", metavar="V", help="vLLM release, such as 0.24.0; the newest rules if left out."
    )(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="loadmaster")
def commands() -> None:
    """Weight and balance for vision-language models on your own GPUs."""


@commands.command()
@click.argument("model")
@click.option(
    "--hash", "hash_files", is_flag=True, help="Compare the content with the SHA-256 of the Hugging Face cache."
)
@click.option(
    "--projector",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Projector of a GGUF model (mmproj); found beside it if left out.",
)
@click.option("--files", "all_files", is_flag=True, help="List every file.")
@_json_option
def inspect(model: str, hash_files: bool, projector: Path | None, all_files: bool, as_json: bool) -> None:
    """Read a checkpoint: what it is, what each part weighs, and whether it is whole.

    MODEL is a directory, a GGUF file, a name in the Hugging Face or ModelScope cache, or a name on the
    hub (then only the configuration and the headers are fetched).
    """
    facts = _read_model(model, projector=projector, hash_files=hash_files)
    if as_json:
        from loadmaster.render.documents import encode, inspect_document

        _write(encode(inspect_document(facts)))
    else:
        from loadmaster.render.model import model_text

        _write(model_text(facts, _width(), _paint(), all_files) + "\n")
    sys.exit(PROBLEM if _has_error(facts.findings) else OK)


@commands.command(context_settings={"ignore_unknown_options": False})
@click.argument("model")
@click.option(
    "--gpus",
    "gpu_spec",
    default="auto",
    metavar="SPEC",
    show_default=True,
    help="2x24GiB, 2xRTX4090, 24GiB,16GiB, a file of 'loadmaster gpus --json', cpu, or auto (NVML).",
)
@click.option("--engine", type=click.Choice(["vllm", "llamacpp"]), help="vllm; llamacpp for a GGUF file.")
@_engine_version_option
@click.option("--recommend", "wanted", is_flag=True, help="Find the launch that fits with the most useful settings.")
@click.option(
    "--context", type=click.IntRange(min=1), metavar="N", help="With --recommend: tokens a request must have room for."
)
@click.option("--concurrency", type=click.IntRange(min=1), metavar="N", help="With --recommend: such requests at once.")
@click.option(
    "--max-image-pixels",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --recommend: the largest picture to serve, width x height.",
)
@click.option("--projector", type=click.Path(path_type=Path), metavar="FILE", help="Projector of a GGUF model.")
@click.option(
    "--svg",
    "svg_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw the load sheet into FILE.",
)
@_json_option
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM FLAGS]")
def plan(
    model: str,
    gpu_spec: str,
    engine: str | None,
    engine_version: str | None,
    wanted: bool,
    context: int | None,
    concurrency: int | None,
    max_image_pixels: int | None,
    projector: Path | None,
    svg_file: Path | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """The load sheet: where each card's memory goes, and whether it fits.

    Flags of 'vllm serve' follow after --, exactly as you would give them to vLLM.
    """
    if not wanted and any(value is not None for value in (context, concurrency, max_image_pixels)):
        raise Failure("--context, --concurrency and --max-image-pixels are wishes for --recommend", "add --recommend")
    facts = _read_model(model, projector=projector)
    facts_engine = _engine(engine, engine_version, facts)
    if facts_engine.name == "llamacpp":
        sheet = _host_sheet(facts, gpu_spec, flags, facts_engine)
    else:
        sheet = _gpu_sheet(facts, model, gpu_spec, flags, facts_engine, wanted, context, concurrency, max_image_pixels)
    if svg_file is not None:
        from loadmaster.render.svg import sheet_svg

        with _file_errors(svg_file):
            svg_file.write_text(sheet_svg(sheet), encoding="utf-8")
    if as_json:
        from loadmaster.render.documents import encode, plan_document

        _write(encode(plan_document(sheet)))
    else:
        from loadmaster.render.sheet import sheet_text

        _write(sheet_text(sheet, _width(), _paint()) + "\n")
    sys.exit({True: OK, False: PROBLEM, None: COULD_NOT_TELL}[sheet.fits])


@commands.command()
@click.option(
    "--gpus", "gpu_spec", metavar="SPEC", help="Cards that the command is meant for; those of this machine if left out."
)
@_engine_version_option
@click.option("--model", "model_path", metavar="MODEL", help="Where the checkpoint is, if not where the command says.")
@click.option(
    "--command-file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Read the command, compose file, manifest, unit or YAML configuration from FILE (- for stdin).",
)
@_json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
def check(
    gpu_spec: str | None,
    engine_version: str | None,
    model_path: str | None,
    command_file: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """The checklist before launch: read a command as people paste it, and say what is wrong with it.

    COMMAND is 'vllm serve ...', a 'docker run' line, and so on. It is read, never run.
    """
    from loadmaster.core.check import check_launch
    from loadmaster.edge.host import read_host

    launch = _read_launch(command, command_file, engine_version)
    engine = _engine("vllm", engine_version or launch.engine_version, None)
    not_checked: list[str] = []
    gpus = _cards_for_check(gpu_spec, not_checked)
    model = _model_for_check(model_path or launch.model, explicit=model_path is not None, not_checked=not_checked)
    findings = check_launch(launch, model=model, gpus=gpus, engine=engine, host=read_host())
    ok = False if _has_error(findings) else (None if not_checked else True)
    if as_json:
        from loadmaster.render.documents import check_document, encode

        _write(encode(check_document(launch, findings, ok, not_checked)))
    else:
        from loadmaster.render.launch import check_text

        _write(check_text(launch, findings, ok, not_checked, _width(), _paint()) + "\n")
    sys.exit({True: OK, False: PROBLEM, None: COULD_NOT_TELL}[ok])


@commands.command()
@click.argument("spec", default="auto")
@_json_option
def gpus(spec: str, as_json: bool) -> None:
    """The cards of this machine, or those of SPEC; --json writes a recording that --gpus takes."""
    from loadmaster.edge.gpus import record
    from loadmaster.render.cards import cards_text
    from loadmaster.render.documents import encode

    cards = _cards(spec)
    _write(encode(record(cards)) if as_json else cards_text(cards, _paint()) + "\n")


# ------------------------------------------------------------------------------------------ reading the world


def _read_model(name: str, *, projector: Path | None = None, hash_files: bool = False) -> ModelFacts:
    from loadmaster.edge.modeldir import ModelError, read_model

    try:
        if name.lower().endswith(".gguf"):
            from loadmaster.edge.gguf import read_gguf

            return read_gguf(Path(name), projector)
        if projector is not None:
            raise Failure("--projector belongs to a GGUF file", f"{name} is none")
        with _progress(hash_files, "hashing") as report:
            return read_model(name, hash_files=hash_files, progress=report)
    except ModelError as error:
        raise Failure(str(error), error.hint, getattr(error, "exit_code", USAGE)) from None


def _cards(spec: str) -> tuple[GpuFacts, ...]:
    from loadmaster.edge.gpus import GpuSpecError, resolve_gpus

    try:
        return resolve_gpus(spec)
    except GpuSpecError as error:
        raise Failure(str(error), error.hint) from None


def _cards_for_check(spec: str | None, not_checked: list[str]) -> tuple[GpuFacts, ...] | None:
    """The cards to check against; None, and a sentence why, when none were named and none can be seen."""
    if spec is not None:
        return _cards(spec)
    try:
        return _cards("auto")
    except Failure:
        not_checked.append("memory: no GPU is visible here and --gpus was not given")
        return None


def _model_for_check(name: str | None, *, explicit: bool, not_checked: list[str]) -> ModelFacts | None:
    """The checkpoint if it is here, else what the table of public models knows, else None and why."""
    if name is None:
        not_checked.append("the model: the command names none")
        return None
    from loadmaster.core.knownmodels import known_model

    if explicit or Path(name).expanduser().exists():
        return _read_model(name)
    cached = _cached_model(name)
    if cached is not None:
        return cached
    known = known_model(name)
    if known is None:
        not_checked.append(f"the model: {name} is not on this machine and not among the public models known here")
    return known


def _cached_model(name: str) -> ModelFacts | None:
    """A model of the local caches; never the network, since a check must not wait for it."""
    from loadmaster.edge.modeldir import ModelError, read_model
    from loadmaster.edge.resolve import in_cache

    if not in_cache(name):
        return None
    try:
        return read_model(name)
    except ModelError:
        return None


def _read_launch(command: Sequence[str], command_file: Path | None, engine_version: str | None) -> LaunchArgs:
    import shlex

    from loadmaster.edge.commandfile import CommandError, read_command, read_command_file

    if bool(command) == (command_file is not None):
        raise Failure("give the command after --, or --command-file FILE", "loadmaster check -- vllm serve MODEL ...")
    try:
        if command_file is None:
            return read_command(shlex.join(command), None, engine_version=engine_version)
        if str(command_file) == "-":
            return read_command(sys.stdin.read(), None, engine_version=engine_version)
        return read_command_file(command_file, engine_version=engine_version)
    except CommandError as error:
        raise Failure(str(error), error.hint) from None


def _engine(name: str | None, version: str | None, model: ModelFacts | None) -> EngineFacts:
    from loadmaster.core.facts import EngineFacts

    is_gguf = model is not None and model.format == "gguf"
    if name == "llamacpp" and model is not None and not is_gguf:
        raise Failure("llama.cpp reads GGUF files, and this model is none", "leave --engine out, or name a .gguf file")
    if name == "llamacpp" or (name is None and is_gguf):
        return EngineFacts("llamacpp", version)
    return EngineFacts("vllm", version)


def _gpu_sheet(
    model: ModelFacts,
    name: str,
    gpu_spec: str,
    flags: Sequence[str],
    engine: EngineFacts,
    wanted: bool,
    context: int | None,
    concurrency: int | None,
    max_image_pixels: int | None,
) -> LoadSheet:
    from loadmaster.core.argv import parse_argv
    from loadmaster.core.plan import make_plan
    from loadmaster.core.recommend import recommend

    cards = _cards(gpu_spec)
    launch = parse_argv(["vllm", "serve", name, *flags], engine_version=engine.version)
    if wanted:
        return recommend(
            model, cards, launch, engine, context=context, concurrency=concurrency, max_image_pixels=max_image_pixels
        )
    return make_plan(model, cards, launch, engine)


def _host_sheet(model: ModelFacts, gpu_spec: str, flags: Sequence[str], engine: EngineFacts) -> LoadSheet:
    from loadmaster.core.facts import LaunchArgs
    from loadmaster.core.hostplan import make_host_plan
    from loadmaster.edge.host import read_host

    if gpu_spec not in ("cpu", "auto"):
        raise Failure(f"a GGUF file is planned for the host's memory, not for {gpu_spec}", "use --gpus cpu")
    launch = LaunchArgs(model=model.path or model.name, argv=tuple(flags), extra=tuple(flags))
    return make_host_plan(model, read_host(), launch, engine)


# ------------------------------------------------------------------------------------------ writing


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has gone: keep Python from complaining when it flushes again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _width() -> int:
    import shutil

    return min(max(shutil.get_terminal_size((80, 24)).columns, 60), 120) if sys.stdout.isatty() else 80


def _paint() -> Paint:
    from loadmaster.render.paint import ansi, plain

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return ansi if coloured else plain


@contextmanager
def _progress(shown: bool, label: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar on stderr for work that takes more than a second; nothing where stderr is no terminal."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)

        def report(done: int, total: int, name: str) -> None:
            bars.update(task, completed=done, total=total, description=f"{label} {name}")

        yield report


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}", exit_code=PROBLEM) from None


def _has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    try:
        commands.main(list(arguments) if arguments is not None else None, prog_name="loadmaster", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
