"""Queue a job and follow it: python examples/submit.py "a red apple, glossy" --model saggar/emoji

Needs SAGGAR_REDIS_URL and a worker that serves the model; `pip install .` in the checkout is enough.
"""

from __future__ import annotations

import argparse
import sys

from redis import RedisError
from saggar.jobs import Job, JobClient, JobSettings, SaggarError


def main() -> None:
    parser = argparse.ArgumentParser(description="Queue a job and follow it to its end.")
    parser.add_argument("prompt", nargs="?", default="a red apple, glossy")
    parser.add_argument(
        "--model", default="saggar/emoji", help="a served model; `saggar models served` lists them"
    )
    wish = parser.parse_args()
    with JobClient(JobSettings.from_env()) as client:
        job = client.submit(Job(model=wish.model, prompt=wish.prompt, priority="interactive"))
        for event in client.events(job.id):
            print(f"{event.time:%H:%M:%S} {event.kind}", event.data.get("step", ""))
        for output in client.result(job.id).outputs:
            print(output.uri, f"seed {output.seed}")


if __name__ == "__main__":
    try:
        main()
    except SaggarError as error:  # what is refused, in one line with what is allowed; a job that failed
        sys.exit(f"submit: {error}")
    except RedisError as error:
        sys.exit(f"submit: Redis, which SAGGAR_REDIS_URL names, cannot be used: {error}")
    except KeyboardInterrupt:  # what is queued is made all the same
        print("submit: stopped; a job that was submitted goes on", file=sys.stderr)
        sys.exit(130)
