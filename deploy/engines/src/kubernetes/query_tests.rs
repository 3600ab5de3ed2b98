//! Tests of `query`.

use super::*;

#[test]
fn pods_are_told_by_role_and_number() {
    let text = r#"{"items": [
          {"metadata": {"name": "d-workers-1-x", "labels": {"app.kubernetes.io/component": "worker", "jobset.sigs.k8s.io/job-index": "0",
             "batch.kubernetes.io/job-completion-index": "1"}},
           "spec": {}, "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": "0/3 nodes"}]}},
          {"metadata": {"name": "d-servers-2", "labels": {"app.kubernetes.io/component": "server", "apps.kubernetes.io/pod-index": "2"}},
           "spec": {"nodeName": "n2"}, "status": {"phase": "Running", "startTime": "t", "containerStatuses": [
             {"restartCount": 3, "state": {"running": {"startedAt": "t"}}}]}},
          {"metadata": {"name": "d-servers-1-0-x", "labels": {"app.kubernetes.io/component": "server", "jobset.sigs.k8s.io/job-index": "1",
             "batch.kubernetes.io/job-completion-index": "0"}},
           "spec": {"nodeName": "n1"}, "status": {"phase": "Failed", "containerStatuses": [
             {"restartCount": 0, "state": {"terminated": {"reason": "Error", "exitCode": 78}}}]}},
          {"metadata": {"name": "other", "labels": {}}}]}"#;
    let all: Vec<_> = parsed(text).expect("pods").into_iter().map(|p| (p.name, p.member)).collect();
    let told: Vec<_> = all.iter().map(|(_, m)| (m.role, m.index, &*m.state, &*m.node, &*m.why)).collect();
    assert_eq!(
        told,
        [
            (Role::Server, Some(1), "Failed", "n1", "Error, code 78"),
            (Role::Server, Some(2), "Running", "n2", "since t, started again 3 times"),
            (Role::Worker, Some(1), "Pending", "", "Unschedulable, 0/3 nodes"),
        ]
    );
    assert!(parsed("No resources").is_err());
}
