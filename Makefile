# Every target does its own set-up.
.PHONY: demo test check format dashboards bench

RUN := .venv/bin

demo:
	@scripts/setup.sh demo
	@$(RUN)/python examples/demo.py $(if $(ONCE),--once)

test:
	@scripts/setup.sh test
	@$(RUN)/python -m pytest

check:
	@scripts/setup.sh test
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports

format:
	@scripts/setup.sh test
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

dashboards:
	@scripts/setup.sh test
	$(RUN)/python -m dashboards.build

bench:
	@scripts/setup.sh test
	$(RUN)/python -m benchmarks.overhead
	$(RUN)/python -m benchmarks.ingest
