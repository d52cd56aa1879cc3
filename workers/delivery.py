"""A message that a lane has handed to this worker."""

from __future__ import annotations

from dataclasses import dataclass

from saggar.engine.handle import Reservation


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job's message in this worker's hands: `token` names the delivery, `put` counts the job's messages, `key` is
    the batch key under which it waited."""

    job_id: str
    token: str
    put: int = 1
    key: str | None = None
    reservation: Reservation | None = None

    def args(self) -> tuple[str, str, int, str | None, Reservation | None]:
        """Those of `Service.run`."""
        return self.job_id, self.token, self.put, self.key, self.reservation
