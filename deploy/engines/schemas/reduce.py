#!/usr/bin/env python3
"""Writes the schemas of this folder from those that projects publish: without descriptions, each part once.

    python3 reduce.py core.json   FOLDER StatefulSet apps/v1 Job batch/v1 ...
    python3 reduce.py jobset.json CRD.yaml ...

FOLDER is one of kubernetes-json-schema's (strict, as in the package kubernetes-validate); a CRD is the file that its project
installs. Needs PyYAML. What is kept is what a manifest is refused for by `kubectl --validate=strict`: fields that there are, types,
what must be there, and enums.
"""

import json
import pathlib
import sys

KEEP = {"type", "enum", "required", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "pattern", "const"}


class Once:
    """Equal parts, stored once."""

    def __init__(self):
        self.defs, self.by_text = [], {}

    def add(self, schema):
        text = json.dumps(schema, sort_keys=True, separators=(",", ":"))
        if len(text) < 60:
            return schema
        if text not in self.by_text:
            self.by_text[text] = len(self.defs)
            self.defs.append(schema)
        return {"$ref": self.by_text[text]}


def reduced(schema, once, resolve):
    if "$ref" in schema:
        return resolve(schema["$ref"])
    out = {k: v for k, v in schema.items() if k in KEEP}
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string" or "oneOf" in schema:
        out.pop("type", None)
        out["type"] = ["integer", "string"] if not is_quantity(schema) else ["integer", "number", "string"]
    properties = schema.get("properties")
    if properties:
        out["properties"] = {k: reduced(v, once, resolve) for k, v in properties.items()}
        # Fields that nobody knows are refused.
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        out["additionalProperties"] = reduced(more, once, resolve)
    if "items" in schema:
        out["items"] = reduced(schema["items"], once, resolve)
    return once.add(out)


def is_quantity(schema):
    return "number" in json.dumps(schema.get("oneOf", "")) or "Quantity" in schema.get("description", "")


def from_folder(folder, kinds, once):
    folder = pathlib.Path(folder)
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    done, busy = {}, set()

    def resolve(ref):
        name = ref.rsplit("/", 1)[-1]
        if name not in done:
            if name in busy:
                return {}
            busy.add(name)
            done[name] = reduced(definitions[name], once, resolve)
        return done[name]

    out = {}
    for kind, version in zip(kinds[::2], kinds[1::2]):
        for name, schema in definitions.items():
            for gvk in schema.get("x-kubernetes-group-version-kind", []):
                at = "/".join(filter(None, (gvk["group"], gvk["version"])))
                if (gvk["kind"], at) == (kind, version):
                    out[f"{version} {kind}"] = resolve(name)
    return out


def from_crds(files, once):
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    out = {}
    for file in files:
        crd = yaml.load(pathlib.Path(file).read_text(), loader)["spec"]
        for version in crd["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            schema["properties"]["metadata"] = {"type": "object"}
            schema["properties"].pop("status", None)
            kind = f"{crd['group']}/{version['name']} {crd['names']['kind']}"
            out[kind] = reduced(schema, once, None)
    return out


def main():
    to, source, *rest = sys.argv[1:]
    once = Once()
    is_folder = pathlib.Path(source).is_dir()
    kinds = from_folder(source, rest, once) if is_folder else from_crds([source, *rest], once)
    # One part a line: a change is seen where it is.
    defs = ",\n".join(json.dumps(d, separators=(",", ":"), sort_keys=True) for d in once.defs)
    pathlib.Path(to).write_text('{"kinds":' + json.dumps(kinds) + ',\n"defs":[\n' + defs + "\n]}\n")


main()
