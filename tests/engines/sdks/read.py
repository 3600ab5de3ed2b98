"""Reads files with the packages of those for whom they are: read.py TRAINER JOBSET PAGE."""

import re
import sys
from importlib.metadata import version

import yaml
from kubeflow_trainer_api import models

KINDS = {
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "JobSet": models.JobsetV1alpha2JobSet,
    "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
}


def lost(written, read, at):
    """The first thing that is written and was not read; a key that the package does not know is dropped by it."""
    if isinstance(written, dict):
        for key, value in written.items():
            if not isinstance(read, dict) or key not in read:
                return f"{at}.{key}"
            if found := lost(value, read[key], f"{at}.{key}"):
                return found
        return None
    if isinstance(written, list):
        if not isinstance(read, list) or len(read) != len(written):
            return at
        return next((found for i, (w, r) in enumerate(zip(written, read)) if (found := lost(w, r, f"{at}[{i}]"))), None)
    return None if written == read else at


def check(file):
    read = []
    with open(file) as documents:
        for document in filter(None, yaml.safe_load_all(documents)):
            model = KINDS.get(document["kind"])
            if model is None:
                continue
            assert (missed := lost(document, model.from_dict(document).to_dict(), document["kind"])) is None, f"{missed} is unknown"
            read.append(document["kind"])
    return read


trainer, jobset, page = sys.argv[1:]
assert set(check(trainer)) == {"ConfigMap", "ClusterTrainingRuntime", "TrainJob"}
assert set(check(jobset)) == {"ConfigMap", "JobSet"}
typo = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": {"runtimeRef": {"name": "a"}, "numNodez": 4}}
assert lost(typo, models.TrainerV1alpha1TrainJob.from_dict(typo).to_dict(), "TrainJob") == "TrainJob.spec.numNodez"
print(f"    Kubeflow's SDK {version('kubeflow')} knows every field of --on trainer and --on jobset")

import sky  # noqa: E402
from sky.skylet import constants  # noqa: E402

with open(page) as text:
    task = sky.Task.from_yaml_str(re.search(r"```yaml\n# SkyPilot.*?\n(.*?)```", text.read(), re.S)[1])
assert task.num_nodes == 4 and task.run.startswith("paraft launch "), task
# The variables by which a task is recognised (deploy/engines/src/place/others.rs).
ours = {"SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_TASK_ID"}
assert not (unknown := ours - {value for value in vars(constants).values() if isinstance(value, str)}), unknown
print(f"    SkyPilot {sky.__version__} reads the task of the page, and sets the variables")
