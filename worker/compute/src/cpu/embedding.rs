//! Token and position embeddings.

use crate::shape::EmbeddingShape;

/// `y[place] = table[token] + positions[place in its sequence]`.
pub fn forward(s: EmbeddingShape, tokens: &[u32], table: &[f32], positions: &[f32], y: &mut [f32]) {
    for (i, (y, &token)) in y.chunks_exact_mut(s.cols).zip(tokens).enumerate() {
        let row = &table[token as usize * s.cols..][..s.cols];
        let position = &positions[i % s.time * s.cols..][..s.cols];
        for ((y, a), b) in y.iter_mut().zip(row).zip(position) {
            *y = a + b;
        }
    }
}

/// Adds each place's gradient to that of its token's row.
pub fn backward_tokens(s: EmbeddingShape, tokens: &[u32], dy: &[f32], dtable: &mut [f32]) {
    for (dy, &token) in dy.chunks_exact(s.cols).zip(tokens) {
        let row = &mut dtable[token as usize * s.cols..][..s.cols];
        row.iter_mut().zip(dy).for_each(|(d, v)| *d += v);
    }
}

/// Overwrites the gradient of the position table, `[context, cols]`. Rows that no sequence reaches get 0.
pub fn backward_positions(s: EmbeddingShape, dy: &[f32], dpositions: &mut [f32]) {
    dpositions.fill(0.0);
    for (i, dy) in dy.chunks_exact(s.cols).enumerate() {
        let row = &mut dpositions[i % s.time * s.cols..][..s.cols];
        row.iter_mut().zip(dy).for_each(|(d, v)| *d += v);
    }
}
