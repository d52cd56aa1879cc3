"""Queue a job and follow it: python examples/submit.py "a red apple, glossy" [MODEL]

Needs SAGGAR_REDIS_URL and a worker that serves the model; `pip install saggar` is enough.
"""

from __future__ import annotations

import sys

from saggar.jobs import Job, JobClient, JobSettings


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "a red apple, glossy"
    model = sys.argv[2] if len(sys.argv) > 2 else "saggar/emoji"
    with JobClient(JobSettings.from_env()) as client:
        job = client.submit(Job(model=model, prompt=prompt, priority="interactive"))
        for event in client.events(job.id):
            print(f"{event.time:%H:%M:%S} {event.kind}", event.data.get("step", ""))
        for output in client.result(job.id).outputs:
            print(output.uri, f"seed {output.seed}")


if __name__ == "__main__":
    main()
