"""loadmaster demo"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from loadmaster.failure import COULD_NOT_TELL, OK, PROBLEM, Failure
from loadmaster.terminal import terminal_paint, terminal_width, write_result

if TYPE_CHECKING:
    from loadmaster.core.facts import LoadSheet
    from loadmaster.core.verification import Report
    from loadmaster.service.demo import Demonstration

INTERRUPTED = 130


@click.command()
@click.option("--once", is_flag=True, help="Ask one question with a picture, print the answer, stop everything.")
@click.option("--port", type=click.IntRange(1, 65535), metavar="P", help="Of the gateway; 7860 or the next free one.")
@click.option("--keep", is_flag=True, help="Leave the folder with the model, the configuration and the logs.")
def demo(once: bool, port: int | None, keep: bool) -> None:
    """From nothing to a picture answered, on this machine's processor, with nothing downloaded.

    Takes a tiny vision-language model that comes with loadmaster and truly answers questions about simple pictures,
    plans it for this machine's memory, serves it under supervision behind the gateway, and proves from end to end
    that the service works. Stays until Ctrl-C.
    """
    from loadmaster.edge.statehome import StateError
    from loadmaster.engines.base import EngineError
    from loadmaster.service.demo import DemoError, demonstration
    from loadmaster.service.refusal import Refusal, SuperviseError
    from loadmaster.service.verifyclient import ServiceError

    code = INTERRUPTED
    kept = None
    try:
        with demonstration(port, keep, _say) as running:
            kept = running.folder if keep else None
            outcome = _shown(running)
            if not once:
                code = outcome  # from here on an interruption is the ordinary end
                _stay(running)
            code = outcome
    except Refusal as error:
        raise Failure(error.message, error.hint, error.exit_code) from None
    except (DemoError, EngineError, StateError, SuperviseError) as error:
        raise Failure(error.message, error.hint, PROBLEM) from None
    except ServiceError as error:
        raise Failure(f"the gateway did not answer: {error.message}", exit_code=PROBLEM) from None
    except OSError as error:
        raise Failure(f"cannot write the demonstration: {error.strerror or error}", exit_code=PROBLEM) from None
    except KeyboardInterrupt:
        _say("interrupted")
    _say(f"stopped; kept: {kept}" if kept is not None else "stopped; nothing is left")
    sys.exit(code)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _shown(running: Demonstration) -> int:
    """Print the plan, the proof and one answer; the exit code that they come to."""
    from loadmaster.render.verification import step_line
    from loadmaster.service.demo import ask, prove

    write_result(f"{_plan_line(running.plan)}\n{running.url} answers after {running.ready_s:.1f} s\n\n")
    report = prove(running, lambda step: write_result(step_line(step, terminal_width(), terminal_paint())))
    write_result(f"\n{_verdict(report)}\n\n")
    question = ask(running)
    write_result(
        f"shown:    {question.picture}\nasked:    {question.question}\nanswered: {question.answer!r} "
        f"({question.seconds:.2f} s)\n"
    )
    return _code(report)


def _code(report: Report) -> int:
    return {True: OK, False: PROBLEM, None: COULD_NOT_TELL}[report.ok]


def _verdict(report: Report) -> str:
    from loadmaster.render.verification import report_summary

    return report_summary(report, terminal_width(), terminal_paint()).rstrip("\n")


def _plan_line(plan: LoadSheet | None) -> str:
    from loadmaster.render.units import size

    if plan is None or not plan.gpus:
        return "plan: none could be made"
    load = plan.gpus[0]
    verdict = {True: "fits", False: "does not fit", None: "could not tell whether it fits"}[plan.fits]
    low, high = load.peak_low_bytes["serving"], load.peak_high_bytes["serving"]
    free = f" of {size(load.free_bytes)} free now" if load.free_bytes is not None else ""
    return f"plan: {size(low)} to {size(high)} of memory when serving{free}: {verdict}"


def _stay(running: Demonstration) -> None:
    import time

    write_result(
        f"\nopen:     {running.url}   (the page)\n"
        f"API:      {running.url}/v1   (any OpenAI client; the model is {running.deployment.name!r})\n"
        f"state:    LOADMASTER_HOME={running.folder / 'state'} loadmaster status {running.deployment.name}\n"
        "Ctrl-C stops it\n"
    )
    while True:
        time.sleep(3600)
