"""loadmaster plan"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loadmaster.commands.options import FlagsAfterDashes, engine_version_option, json_option, token_count
from loadmaster.commands.reading import engine_facts, read_engine_cards, read_launch, read_model
from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, Failure
from loadmaster.terminal import terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.facts import EngineFacts, LaunchArgs, LoadSheet, ModelFacts


@click.command(cls=FlagsAfterDashes, before_dashes="plan MODEL", after_dashes="--tensor-parallel-size 2 ...")
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
@engine_version_option
@click.option("--recommend", "wanted", is_flag=True, help="Find the launch that fits with the most useful settings.")
@click.option("--context", type=token_count, metavar="N", help="With --recommend: tokens a request must have room for.")
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
    help="Also draw the load sheet into FILE; - for standard output, instead of the text.",
)
@json_option
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
    if as_json and str(svg_file) == "-":
        raise Failure("--json and --svg - both write to standard output", "give --svg a file")
    if not wanted and any(value is not None for value in (context, concurrency, max_image_pixels)):
        raise Failure("--context, --concurrency and --max-image-pixels are wishes for --recommend", "add --recommend")
    facts = read_model(model, projector=projector, allow_known=True)
    facts_engine = engine_facts(engine, engine_version, facts)
    if facts_engine.name == "llamacpp":
        if wanted:
            raise Failure("--recommend finds launches of vLLM, and this is planned for llama.cpp", "leave it out")
        sheet = host_sheet(facts, gpu_spec, flags, facts_engine)
    else:
        sheet = gpu_sheet(facts, model, gpu_spec, flags, facts_engine, wanted, context, concurrency, max_image_pixels)
    if svg_file is not None and str(svg_file) == "-":
        from loadmaster.render.svg import sheet_svg

        write_result(sheet_svg(sheet))
        sys.exit({True: OK, False: PROBLEM, None: COULD_NOT_TELL}[sheet.fits])
    if as_json:
        from loadmaster.render.documents import encode, plan_document

        write_result(encode(plan_document(sheet)))
    else:
        from loadmaster.render.sheet import sheet_text

        write_result(sheet_text(sheet, terminal_width(), terminal_paint()) + "\n")
    if svg_file is not None:
        write_drawing(sheet, svg_file)
    sys.exit({True: OK, False: PROBLEM, None: COULD_NOT_TELL}[sheet.fits])


def write_drawing(sheet: LoadSheet, path: Path) -> None:
    """The drawn sheet as a file. What cannot be written says nothing of the plan, so it has another exit code."""
    from loadmaster.edge.regularfile import write_text
    from loadmaster.render.svg import sheet_svg

    try:
        write_text(path, sheet_svg(sheet))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"cannot write {path}: {reason}", "the sheet itself is above") from None


def gpu_sheet(
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
    from msgspec import structs

    from loadmaster.core.facts import EngineFacts
    from loadmaster.core.localcalibration import with_learnt
    from loadmaster.core.plan import make_plan
    from loadmaster.core.recommend import recommend
    from loadmaster.edge.learnt import read_learnt

    learnt, problem = read_learnt()
    if problem is not None:
        click.echo(f"earlier runs do not count: {problem}", err=True)
    cards = with_learnt(read_engine_cards(gpu_spec), learnt)
    launch = launch_after(name, flags, engine.version)
    engine = EngineFacts(engine.name, engine.version or launch.engine_version)
    if wanted:
        sheet = recommend(
            model, cards, launch, engine, context=context, concurrency=concurrency, max_image_pixels=max_image_pixels
        )
    else:
        sheet = make_plan(model, cards, launch, engine)
    if launch.model != name:
        sheet = structs.replace(
            sheet, notes=(f"the command serves {launch.model}, the plan is of {name}", *sheet.notes)
        )
    return sheet


def launch_after(name: str, words: Sequence[str], engine_version: str | None) -> LaunchArgs:
    """The launch that stands after ``--``: flags alone, or a whole command, which is read as ``check`` reads it."""
    from loadmaster.core.argv import parse_argv

    words = list(words)
    if words and not words[0].startswith("-"):
        if words[0] in (name, "serve"):
            words = words[1:] if words[0] == name else ["vllm", *words]
        if words and not words[0].startswith("-"):
            launch = read_launch(words, None, engine_version)
            if launch.model is None:
                raise Failure(
                    "after -- stands a command that names no model", "give the flags alone, or vllm serve MODEL"
                )
            return _without_own_options(launch)
    return _without_own_options(parse_argv(["vllm", "serve", name, *words], engine_version=engine_version))


def _without_own_options(launch: LaunchArgs) -> LaunchArgs:
    """The launch as it is; an option of this command among its flags would change nothing, and is refused."""
    own = {option for parameter in plan.params for option in parameter.opts}
    for flag in launch.unknown_flags:
        if flag.partition("=")[0] in own:
            raise Failure(f"{flag} is an option of loadmaster plan, not of vLLM", "put it before --")
    return launch


def host_sheet(model: ModelFacts, gpu_spec: str, flags: Sequence[str], engine: EngineFacts) -> LoadSheet:
    from loadmaster.core.facts import LaunchArgs
    from loadmaster.core.hostplan import make_host_plan
    from loadmaster.edge.host import read_host

    if gpu_spec not in ("cpu", "auto"):
        raise Failure(f"a GGUF file is planned for the host's memory, not for {gpu_spec}", "use --gpus cpu")
    launch = LaunchArgs(model=model.path or model.name, argv=tuple(flags), extra=tuple(flags))
    return make_host_plan(model, read_host(), launch, engine)
