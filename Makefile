# Each target sets itself up.
.PHONY: demo test wide check format docs dashboards bench fuzz soak

RUN := .venv/bin
export NO_MKDOCS_2_WARNING := 1

demo:
	@scripts/setup.sh demo
	@$(RUN)/python examples/demo.py $(if $(ONCE),--once) $(if $(FSDP),--fsdp)

test:
	@scripts/setup.sh test
	@$(RUN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not alone and not wide"
	@$(RUN)/python -m pytest -m "alone and not wide" tests/integration

# More cases of what `test` covers, injected faults, and every benchmark in its smallest form.
wide:
	@scripts/setup.sh test
	@scripts/setup.sh manifests
	@scripts/setup.sh containers
	@$(RUN)/python -m pytest -n 4 --dist loadfile -m "wide and not alone"
	@$(RUN)/python -m pytest -m "wide and alone" tests/integration

check:
	@scripts/setup.sh test
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	@scripts/javascript.sh check
	$(RUN)/python -m mkdocs build

format:
	@scripts/setup.sh test
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .
	@scripts/javascript.sh format

# The site is written to build/site.
docs:
	@scripts/setup.sh test
	$(RUN)/python -m mkdocs build

dashboards:
	@scripts/setup.sh test
	$(RUN)/python -m dashboards.build

bench:
	@scripts/setup.sh test
	$(RUN)/python -m benchmarks.overhead
	$(RUN)/python -m benchmarks.ingest

# SECONDS=3600 searches longer. Failing inputs are written to build/fuzz; add them to tests/fuzz/corpus.
fuzz:
	@scripts/setup.sh test
	FUZZ_EXAMPLES=300 $(RUN)/python -m pytest --timeout 0 tests/fuzz tests/server/api/test_contract.py
	@mkdir -p build/fuzz
	$(RUN)/python -m tests.fuzz.target build/fuzz/corpus -max_total_time=$(or $(SECONDS),600) -timeout=60 -rss_limit_mb=1500 -artifact_prefix=build/fuzz/

# SECONDS=600 runs for ten minutes.
soak:
	@scripts/setup.sh test
	$(RUN)/python -m benchmarks.soak --seconds $(or $(SECONDS),3600)
