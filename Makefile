# Everything a person does with this repository. `make` alone lists it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
IN = .venv/bin/python
IN_MODELS = .tidegate/models/bin/python
IN_ENGINES = .tidegate/engines/bin/python
IN_FUZZ = .tidegate/fuzz/bin/python
UV = .tidegate/uv/bin/uv
NAME ?= console
ARGS ?=
SEEDS ?= 200
STEPS ?=
MINUTES ?= 10
LOCK ?= run
ENGINE ?=
OSV ?= all.zip
AUDITED = run dev fuzz audit uv
# What was compiled is kept, whatever the environment says: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# Of the image, and of a checkout.
OF_IMAGE = --extra console --extra brain --extra cluster --extra kubernetes --extra manager --extra redundancy
EXTRAS = $(OF_IMAGE) --extra embedded

.DEFAULT_GOAL := help
.PHONY: help proto manifests up known-engine down incident rollout check test compiled-mover test-kubernetes test-image test-debian contract test-models test-engines lint fmt bench bench-models bench-engines bench-routing sim sim-long docs clean lock run-environment dev-environment models-environment engines-environment fuzz hostile chaos sbom audit audit-offline wheel fuzz-environment audit-environment routers-environment

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' Makefile

up: known-engine run-environment $(if $(ENGINE),engines-environment) ## start everything in the foreground; Ctrl-C stops it; ENGINE=vllm: with a real vLLM
	@exec $(IN) -m console.stack up $(if $(ENGINE),--engine $(ENGINE))

known-engine:
	@case "$(ENGINE)" in ""|vllm) ;; *) echo "ENGINE is “$(ENGINE)”, but can only be vllm." >&2; exit 64;; esac

down: ## stop what `make up` started
	@if test -x $(IN); then $(IN) -m console.stack down; else echo "Tidegate is not running."; fi

incident: run-environment ## stage an incident on the running demo: slow spine, alert, fix, recovery
	@exec $(IN) -m console.stack incident

rollout: run-environment ## stage rollouts on the running demo: one keeps the cache, one is broken and undone
	@exec $(IN) -m console.stack rollout

# Four on two cores, here and below: tests of processes wait as much as they work.
check: dev-environment compiled-mover ## the everyday tests, without browser and whole stacks
	$(IN) -m pytest -n 4 -m "not slow and not browser and not stack" $(ARGS)

test: dev-environment compiled-mover ## all tests; as root it installs Chromium and iproute2 where they are absent
	@$(PYTHON) console/stack/bootstrap.py machine
	$(IN) -m pytest -n 4 --dist loadgroup $(ARGS)

# Once for all: else each agent that a test starts compiles it for itself. Without a compiler tests of it are skipped.
compiled-mover: dev-environment
	@-$(IN) -m kvss_agent.native

test-kubernetes: dev-environment ## the tests on Kubernetes: binaries in KUBEBUILDER_ASSETS, or the cluster of KUBECONFIG
	BED_KUBECONFIG=$(if $(KUBEBUILDER_ASSETS),,$(KUBECONFIG)) $(IN) -m pytest -m kubernetes $(ARGS)

test-image: dev-environment ## the tests of the image, in root file systems of debootstrap; as root, some ten minutes
	$(IN) -m pytest -m image tests/deploy $(ARGS)

test-models: models-environment ## the tests with real models; installs torch in an environment of its own
	$(IN_MODELS) -m pytest -n 2 -m models tests/swdriver_shim tests/inference_brain/test_transformers_templates.py $(ARGS)

test-engines: engines-environment ## the tests with real engines; installs vLLM in an environment of its own
	$(IN_ENGINES) -m pytest -m engines tests/engines $(ARGS)

lint: dev-environment ## ruff, mypy --strict, the dependency rule
	$(IN) -m ruff check .
	$(IN) -m ruff format --check .
	$(IN) -m mypy
	.venv/bin/lint-imports

fmt: dev-environment ## format the code and fix what ruff can fix
	$(IN) -m ruff check --fix .
	$(IN) -m ruff format .

bench: dev-environment ## measure: make bench NAME=console ARGS="--quick --json rows.json"
	$(IN) -m benchmarks.$(NAME) $(ARGS)

bench-routing: dev-environment routers-environment ## compare with other routers; installs them in an environment of their own
	$(IN) -m benchmarks.routing $(ARGS)

bench-models: models-environment ## measure what refilled prefixes save with real models
	$(IN_MODELS) -m benchmarks.models $(ARGS)

bench-engines: engines-environment ## measure what refilled prefixes save with a real vLLM
	$(IN_ENGINES) -m benchmarks.engines $(ARGS)

sim: dev-environment ## the deterministic simulations: make sim SEEDS=1000 STEPS=1000
	SEEDS=$(SEEDS) STEPS=$(STEPS) SEED=$(SEED) LIFE=$(LIFE) $(IN) -m pytest -m sim -s -q $(if $(LIFE),-k "whatever_breaks or bad_network or newest_document") $(ARGS)

sim-long: dev-environment ## the simulations with long runs: make sim-long MINUTES=60; also STEPS=1000000 WORLD=driver PROCESSES=1
	$(IN) -m tests.long_lives --minutes $(MINUTES) --base $(or $(BASE),0) $(if $(STEPS),--steps $(STEPS)) $(if $(WORLD),--world $(WORLD)) $(if $(PROCESSES),--processes $(PROCESSES)) $(ARGS)

manifests: dev-environment ## make the manifests in deploy/kubernetes of the Helm chart
	$(IN) -m tests.kubernetes.chart

docs: dev-environment ## write the docs that are generated from code
	$(IN) -m console.write_docs

clean: down ## remove environment and caches; with DATA=1 also the stack's data
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	$(if $(DATA),rm -rf .tidegate,)

fuzz: fuzz-environment ## fuzz the decoders: make fuzz MINUTES=20 TARGET=frames
	nice -n 15 $(IN_FUZZ) -m tests.fuzz $(TARGET) --minutes $(MINUTES) $(ARGS)

sbom: run-environment ## a bill of materials (CycloneDX) of the locked packages: make sbom LOCK=run
	$(IN) -m console.supply.sbom --lock $(LOCK) --output .tidegate/sbom/$(LOCK).cdx.json

# Strictly: what could not be asked about is a failure, and not a package without known vulnerabilities.
audit: audit-environment ## known vulnerabilities of the locked packages, over the network
	@for lock in $(AUDITED); do echo "$$lock:"; .tidegate/audit/bin/pip-audit --strict --progress-spinner off --require-hashes --disable-pip -r requirements/$$lock.txt || exit 1; done

audit-offline: run-environment ## known vulnerabilities, from a copy of OSV's advisories: make audit-offline OSV=all.zip
	$(IN) -m console.supply.audit $(OSV)

test-debian: dev-environment ## the tests of installing on Debian, on a machine with its own systemd; as root, some ten minutes
	$(IN) -m pytest -m debian -p no:randomly tests/packaging $(ARGS)

contract: dev-environment ## test the API with more generated requests: make contract EXAMPLES=50 SEED=7
	EXAMPLES=$(or $(EXAMPLES),25) SEED=$(or $(SEED),1) $(IN) -m pytest -n 2 tests/console/api/test_contract.py $(ARGS)

chaos: dev-environment ## kill processes of a doubled stack under load: make chaos SECONDS=600 SEED=7
	$(IN) -m tests.chaos --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) $(ARGS)

hostile: dev-environment ## hostile peers against a whole stack: make hostile MINUTES=10 SEED=7
	$(IN) -m tests.hostile --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

wheel: dev-environment ## build the wheel in .tidegate/wheel, with the compiled mover where there is a C compiler
	$(IN) -m hatchling build --target wheel --directory .tidegate/wheel

lock: dev-environment ## resolve and lock the dependencies
	echo "uv==$$($(UV) --version | cut -d' ' -f2)" | $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" - -o requirements/uv.txt
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" pyproject.toml $(EXTRAS) -o requirements/run.txt
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" -c requirements/run.txt pyproject.toml $(EXTRAS) --group dev -o requirements/dev.txt
	$(UV) pip compile -q --python-platform linux --python-version 3.11 --generate-hashes --custom-compile-command "make lock" -c requirements/run.txt pyproject.toml $(OF_IMAGE) -o requirements/image.txt
	printf 'hatchling\npip\n' | $(UV) pip compile -q --python-platform linux --python-version 3.11 --generate-hashes --custom-compile-command "make lock" -c requirements/dev.txt - -o requirements/build.txt
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" -c requirements/dev.txt pyproject.toml --extra console --group fuzz -o requirements/fuzz.txt
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --group audit -o requirements/audit.txt
	$(UV) pip compile -q --python-platform linux --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --group routers -o requirements/routers.txt
	echo torch | $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" -c requirements/dev.txt --excludes - pyproject.toml $(EXTRAS) --group models --extra transformers -o requirements/models.txt
	printf 'opencv-python-headless\nsetuptools\ntorch\ntorchaudio\ntorchcodec\ntorchvision\nintel-openmp\n' | $(UV) pip compile -q --python-platform linux --python-version 3.11 --generate-hashes --custom-compile-command "make lock" -c requirements/dev.txt --excludes - pyproject.toml $(EXTRAS) --group engines -o requirements/engines.txt

run-environment:
	@$(PYTHON) console/stack/bootstrap.py run

dev-environment:
	@$(PYTHON) console/stack/bootstrap.py dev

models-environment:
	@$(PYTHON) console/stack/bootstrap.py models

audit-environment:
	@$(PYTHON) console/stack/bootstrap.py audit

fuzz-environment:
	@$(PYTHON) console/stack/bootstrap.py fuzz

engines-environment:
	@$(PYTHON) console/stack/bootstrap.py engines

routers-environment:
	@$(PYTHON) console/stack/bootstrap.py routers


proto: dev-environment ## make the code of cluster_server/proto anew
	$(IN) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. cluster_server/proto/cluster.proto
