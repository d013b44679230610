"""The engine tier's time limit, and its table of figures."""

import os
import time

import pytest


def pytest_runtest_setup() -> None:
    """No test starts after ENGINE_DEADLINE, in seconds since 1970."""
    deadline = os.environ.get("ENGINE_DEADLINE")
    if deadline and time.time() > float(deadline):
        pytest.skip("not run: no time left")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests gave to `record_property`."""
    lines = [
        f"{report.nodeid.split('::')[-1]}: {name} {value}"
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
    ]
    if lines:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join((*lines, "")))
