"""Dataset runs: the plan of a run, the ledger of its rows, and the controller that takes them to their ends."""

from saggar.jobs.runs.contract import Ended, Finisher, KeepAll, Plan, Verdict
from saggar.jobs.runs.controller import Controller
from saggar.jobs.runs.ledger import LeaseLost, RunLedger, Settled
from saggar.jobs.runs.record import OutputFormat, Run, RunSpec, RunState

__all__ = [
    "Controller",
    "Ended",
    "Finisher",
    "KeepAll",
    "LeaseLost",
    "OutputFormat",
    "Plan",
    "Run",
    "RunLedger",
    "RunSpec",
    "RunState",
    "Settled",
    "Verdict",
]
