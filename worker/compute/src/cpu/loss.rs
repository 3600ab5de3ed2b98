//! Losses over row-major slices: value, and gradient with respect to the model's output.

/// Softmax and cross-entropy, mean over the batch: `torch.nn.functional.cross_entropy`. The logits become the gradient.
///
/// `logits` is `[n, classes]`, `labels` is `[n]` with values below `classes`. The largest logit of a row is subtracted before
/// the exponential, so any finite logits are fine.
pub fn softmax_cross_entropy(logits: &mut [f32], labels: &[u32], classes: usize) -> f32 {
    assert_eq!(logits.len(), labels.len() * classes, "cross entropy: logits");
    let scale = 1.0 / labels.len() as f32;
    let mut loss = 0.0f64;
    for (row, &label) in logits.chunks_exact_mut(classes).zip(labels) {
        let label = label as usize;
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let at_label = row[label] - max;
        let mut sum = 0.0;
        for v in row.iter_mut() {
            *v = (*v - max).exp();
            sum += *v;
        }
        for v in row.iter_mut() {
            *v *= scale / sum;
        }
        row[label] -= scale;
        loss += f64::from(sum.ln() - at_label);
    }
    (loss / labels.len() as f64) as f32
}

/// Sum of the cross-entropy over the rows, and how many rows have their largest logit at the label.
pub fn cross_entropy_sum(logits: &[f32], labels: &[u32], classes: usize) -> (f64, u64) {
    assert_eq!(logits.len(), labels.len() * classes, "cross entropy: logits");
    let (mut loss, mut correct) = (0.0f64, 0);
    for (row, &label) in logits.chunks_exact(classes).zip(labels) {
        let label = label as usize;
        let mut best = 0;
        for (i, v) in row.iter().enumerate() {
            if *v > row[best] {
                best = i;
            }
        }
        let sum: f64 = row.iter().map(|v| f64::from(v - row[best]).exp()).sum();
        loss += sum.ln() - f64::from(row[label] - row[best]);
        correct += u64::from(best == label);
    }
    (loss, correct)
}

/// Mean of the squared difference over all values: `torch.nn.functional.mse_loss`. `dy` is its gradient with
/// respect to `y`; all three have one length.
pub fn mse(y: &[f32], target: &[f32], dy: &mut [f32]) -> f32 {
    assert_eq!(y.len(), target.len(), "mse: target");
    assert_eq!(y.len(), dy.len(), "mse: dy");
    let scale = 2.0 / y.len() as f32;
    for ((d, a), b) in dy.iter_mut().zip(y).zip(target) {
        *d = (a - b) * scale;
    }
    (squared_difference(y, target) / y.len() as f64) as f32
}

/// Sum of the squared difference over all values.
pub fn squared_difference(y: &[f32], target: &[f32]) -> f64 {
    assert_eq!(y.len(), target.len(), "squared difference: target");
    let mut total = 0.0f64;
    // Eight running sums let the compiler use vectors; each is short enough for single precision.
    for (a, b) in y.chunks(1024).zip(target.chunks(1024)) {
        let mut sums = [0.0f32; 8];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
        for (a, b) in a.iter().zip(b) {
            for i in 0..8 {
                sums[i] += (a[i] - b[i]) * (a[i] - b[i]);
            }
        }
        for (s, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
            *s += (a - b) * (a - b);
        }
        total += f64::from(sums.iter().sum::<f32>());
    }
    total
}
