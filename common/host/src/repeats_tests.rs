//! Tests of `repeats`.

use super::*;
use std::sync::Arc;
use tracing_subscriber::layer::SubscriberExt;

#[test]
fn line_that_repeats_is_written_once_and_counted() {
    let (mut known, began) = (Known::default(), Instant::now());
    let at = |ms: u64| began + Duration::from_millis(ms);
    assert_eq!(known.hear("a", at(0)), (true, 0));
    let more = (1..60).map(|i| known.hear("a", at(500 * i))).filter(|heard| *heard == (false, 0)).count();
    assert_eq!((more, known.hear("b", at(29_000))), (59, (true, 0)), "another line is another");
    assert_eq!(known.hear("a", at(30_000)), (true, 59));
    assert_eq!(known.hear("a", at(90_000)), (true, 0));
}

#[test]
fn lines_that_are_known_are_bounded() {
    let (mut known, began) = (Known::default(), Instant::now());
    for i in 0..3 * MAX_LINES as u64 {
        assert_eq!(known.hear(&i.to_string(), began + Duration::from_millis(i)), (true, 0));
        assert!(known.0.len() <= MAX_LINES);
    }
    let last = (3 * MAX_LINES - 1).to_string();
    assert_eq!(known.hear(&last, began + Duration::from_secs(1)), (false, 0));
}

#[test]
fn numbers_do_not_make_another_line() {
    assert_eq!(without_numbers("T12-N3 at 00:01.5"), "T#-N# at #:#.#");
}

struct Count(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> Layer<S> for Count {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        self.0.lock().expect("one thread").push(words(event));
    }
}

#[test]
fn no_layer_gets_a_line_that_repeats() {
    let (before, behind) = (Arc::default(), Arc::default());
    let layers = tracing_subscriber::registry().with(Count(Arc::clone(&before)));
    let layers = layers.with(Repeats::default()).with(Count(Arc::clone(&behind)));
    tracing::subscriber::with_default(layers, || {
        for i in 0..9 {
            tracing::error!(shard = 1, "stopped");
            tracing::error!(shard = i % 2, "stopped");
        }
    });
    let lines = ["stopped shard=1", "stopped shard=0"];
    assert_eq!(*before.lock().expect("one thread"), lines);
    assert_eq!(*behind.lock().expect("one thread"), lines);
}
