"""The bill of materials inside the wheel (PEP 770): the package and its dependencies, in CycloneDX."""

import json
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "sbom.cdx.json"


def page() -> str:
    """Return the JSON of `sbom.cdx.json`; the versions of dependencies are ranges, as pip resolves them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    own = f"pkg:pypi/{name}@{version}"
    components = []
    for requirement in project["dependencies"]:
        package, accepted = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        lowest = accepted.removeprefix(">=")
        components.append(
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{package}",
                "name": package,
                "purl": f"pkg:pypi/{package}",
                "isExternal": True,
                "versionRange": f"vers:pypi/>={lowest}",
            }
        )
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": name,
                "version": version,
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": own,
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [component["bom-ref"] for component in components]}],
    }
    return json.dumps(document, indent=2) + "\n"
