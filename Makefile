types:
	mkdir -p .types/saggar && for p in jobs engine storage workers; do ln -sfn ../../$$p .types/saggar/$$p; done
	.venv/bin/mypy -p saggar.jobs -p saggar.engine -p saggar.storage -p saggar.workers
