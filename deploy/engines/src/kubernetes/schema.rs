//! For tests: whether a manifest is one by the schemas that Kubernetes, JobSet and Kubeflow Trainer publish (`schemas/`), as
//! `kubectl --validate=strict` would see it. Rules in CEL are not among them.

use serde_json::Value;

const ALL: [&str; 3] = [
    include_str!("../../schemas/core.json"),
    include_str!("../../schemas/jobset.json"),
    include_str!("../../schemas/trainer.json"),
];

/// What is wrong with it, each with its place.
pub(crate) fn wrongs(manifest: &Value) -> Vec<String> {
    let text = |key: &str| manifest[key].as_str().unwrap_or_default();
    let kind = format!("{} {}", text("apiVersion"), text("kind"));
    for all in ALL {
        let all: Value = serde_json::from_str(all).expect("a file of schemas");
        if let Some(schema) = all["kinds"].get(&kind) {
            let mut wrongs = Vec::new();
            check(manifest, schema, &all["defs"], "", &mut wrongs);
            return wrongs;
        }
    }
    vec![format!("no schema of `{kind}`")]
}

fn check(value: &Value, schema: &Value, defs: &Value, at: &str, wrongs: &mut Vec<String>) {
    if let Some(def) = schema["$ref"].as_u64() {
        return check(value, &defs[def as usize], defs, at, wrongs);
    }
    let mut wrong = |why: String| wrongs.push(format!("{at}: {why}"));
    if !is_of(value, &schema["type"]) {
        return wrong(format!("{value} is no {}", schema["type"]));
    }
    if let Some(all) = schema["enum"].as_array().filter(|all| !all.contains(value)) {
        wrong(format!("{value} is none of {all:?}"));
    }
    let number = |key: &str| schema[key].as_f64();
    let out =
        |n: f64| number("minimum").is_some_and(|min| n < min) || number("maximum").is_some_and(|max| n > max);
    if value.as_f64().is_some_and(out) {
        wrong(format!("{value} is out of bounds"));
    }
    let many = value.as_array().map(Vec::len).or(value.as_str().map(str::len)).map(|n| n as f64);
    if let Some(n) = many {
        let low = number("minItems").or(number("minLength")).is_some_and(|min| n < min);
        if low || number("maxItems").or(number("maxLength")).is_some_and(|max| n > max) {
            wrong(format!("its length is {n}"));
        }
    }
    for key in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.get(key).is_none() {
            wrong(format!("`{key}` is missing"));
        }
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        let at = format!("{at}/{key}");
        match (schema["properties"].get(key), &schema["additionalProperties"]) {
            (Some(schema), _) => check(value, schema, defs, &at, wrongs),
            (None, Value::Bool(false)) => wrongs.push(format!("{at}: there is no such field")),
            (None, more) => check(value, more, defs, &at, wrongs),
        }
    }
    for (n, value) in value.as_array().into_iter().flatten().enumerate() {
        check(value, &schema["items"], defs, &format!("{at}/{n}"), wrongs);
    }
}

fn is_of(value: &Value, kind: &Value) -> bool {
    match kind {
        Value::Array(kinds) => kinds.iter().any(|kind| is_of(value, kind)),
        Value::String(kind) => match kind.as_str() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            // Clients may leave out what is null; ours write none.
            _ => false,
        },
        _ => true,
    }
}
