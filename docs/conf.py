"""The site of the documentation: ``make docs`` builds it into build/docs/<version>/, with warnings as errors."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_site"))

import remesh  # noqa: E402

project = "Remesh"
author = copyright = "The Remesh developers"
release = version = remesh.__version__
_about = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
    "links",
    "trees",
    "command_pages",
    "name_pages",
    "versions",
]
exclude_patterns = ["_site"]
# Page: what lies below it in the menu, line by line, as a page or as "title </page>".
site_trees = {
    "index": """
        Quick start </start>
        Elastic jobs </elastic/index>
        Checkpoints </checkpoint/index>
        Resharding </reshard>
        Integrations </integrations/index>
        Reference </reference/index>
        MPI programs </mpi/index>
        Unmodified torchrun scripts </torch_programs/index>
        Pipelines </pipeline/index>
        Measured </measured>
        Command line </cli>
        Dashboard </dashboard>
        Testbed </testbed>
        Glossary </glossary>
        Versions </versions>
        Inside </inside>""",
    "elastic/index": """
        remesh run </elastic/run>
        /elastic/nodes
        Slurm and Kubernetes </elastic/clusters>
        /elastic/failures""",
    "checkpoint/index": """
        /checkpoint/from_torch_dcp
        /checkpoint/from_megatron
        /checkpoint/sharded
        /checkpoint/tools""",
    "checkpoint/from_megatron": "Differences </checkpoint/differences>",
    "reshard": """
        /reshard/running
        /reshard/strategies""",
    "pipeline/index": """
        /pipeline/runtime
        /pipeline/schedules""",
    "integrations/index": "\n".join(
        sorted(f"/integrations/{page.stem}" for page in (HERE / "integrations").glob("*.md") if page.stem != "index")
    ),
    "mpi/index": """
        /mpi/costs
        /mpi/limits""",
    "torch_programs/index": """
        /torch_programs/limits""",
    "measured": """
        Recovery </elastic/measured>
        Phases of a recovery </elastic/recovery>
        Restarts </elastic/restarts>
        Checkpoints </checkpoint/measured>
        Planning checkpoints </checkpoint/planning>
        Resharding </reshard/measured>
        /reshard/first_byte
        /reshard/scale
        /reshard/ablation
        /pipeline/measured
        /pipeline/simulated
        MPI programs </mpi/measured>
        Unmodified torchrun scripts </torch_programs/measured>
        Memory </memory>
        Process images </mpi/images-measured>""",
    "inside": """
        /promises
        /gpu
        /architecture
        /layout
        /reshard/planning
        /elastic/protocol
        /mpi/protocol
        /mpi/images
        /mpi/in_place
        /checkpoint/format""",
}
# Reached by links alone: in no menu, and no search looks into their texts.
site_unlisted = ("decisions/", "mpi/matrix")
suppress_warnings = ["myst.header"]  # a page may go from its title to a small heading

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

default_role = "py:obj"
autodoc_default_options = {"members": True, "undoc-members": False, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

repository_url = _about.get("urls", {}).get("Repository", "")
copybutton_prompt_text = "$ "
html_theme = "pydata_sphinx_theme"
html_title = f"Remesh {release}"
html_static_path = ["_static"]
html_css_files = ["remesh.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "Remesh"},
    "navbar_align": "left",
    "navbar_end": ["version-switcher", "theme-switcher"],
    "switcher": {"json_url": "../versions.json", "version_match": release},
    "check_switcher": False,
    "show_toc_level": 1,
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
}
