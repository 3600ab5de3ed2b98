//! Token and position embeddings.

use super::{
    CudaDevice,
    buffers::{Ids, Values},
    room,
};
use crate::{
    cuda::{
        flat::{Gradient, Params},
        kernels::Unit,
        launch::{Arg, Geometry, int},
    },
    device::Embeddings,
    error::{DeviceError, Result},
    shape::{EmbeddingAt, EmbeddingShape},
};

impl Embeddings for CudaDevice {
    fn embedding(
        &mut self,
        s: EmbeddingShape,
        tokens: &Ids,
        params: &Params,
        at: EmbeddingAt,
        y: &mut Values,
    ) -> Result {
        let rows = s.batch * s.time;
        self.sized(y, rows * s.cols, "activations")?;
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Embedding,
                "embedding",
                Geometry::line(rows.div_ceil(8).min(1 << 20), 256),
                &[
                    ("tokens", tokens.at()),
                    ("table", Arg::At(params.f32_at(at.tokens))),
                    ("positions", Arg::At(params.f32_at(at.positions))),
                    ("y", y.at()),
                    ("rows", int(rows)),
                    ("cols", int(s.cols)),
                    ("time", int(s.time)),
                    ("vocab", int(s.vocab)),
                ],
            )
        }
    }

    fn order_tokens(&mut self, s: EmbeddingShape, tokens: &mut Ids) -> Result {
        let most = by_token(&tokens.host, s.vocab, &mut self.work.sorted);
        let order = room(&self.context, &mut tokens.order, self.work.sorted.len(), "tokens in order")?;
        self.orders.upload(&self.stream, &self.work.sorted, order)?;
        tokens.most = Some(most);
        Ok(())
    }

    fn embedding_backward(
        &mut self,
        s: EmbeddingShape,
        tokens: &Ids,
        dy: &Values,
        at: EmbeddingAt,
        grads: &mut Gradient,
    ) -> Result {
        let rows = tokens.host.len();
        let (Some(sorted), Some(most)) = (&tokens.order, tokens.most) else {
            return Err(DeviceError::Unsupported(
                "the gradient of an embedding whose tokens are not in order".into(),
            ));
        };
        let (order, starts, ids) =
            (Arg::At(sorted.at(0)), Arg::At(sorted.at(rows)), Arg::At(sorted.at(rows + most + 1)));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Embedding,
                "embedding_backward",
                Geometry::grid([most, s.cols.div_ceil(256), 1], 256),
                &[
                    ("dy", dy.at()),
                    ("order", order),
                    ("starts", starts),
                    ("ids", ids),
                    ("dtable", Arg::At(grads.at(at.tokens))),
                    ("unique", int(most)),
                    ("cols", int(s.cols)),
                    ("accumulate", Arg::Int(1)),
                ],
            )
        }?;
        // Positions that no sequence reaches.
        grads.clear(&self.stream, at.positions + s.time * s.cols..at.positions + s.context * s.cols)?;
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Embedding,
                "position_backward",
                Geometry::flat(s.time * s.cols),
                &[
                    ("dy", dy.at()),
                    ("dpositions", Arg::At(grads.at(at.positions))),
                    ("batch", int(s.batch)),
                    ("time", int(s.time)),
                    ("cols", int(s.cols)),
                    ("accumulate", Arg::Int(0)),
                ],
            )
        }
    }
}

/// Orders places by their token, stably: `order[rows]`, `starts[most + 1]`, `ids[most]`, concatenated in `out`.
/// Returns the maximum number of tokens in this many places. Unused entries follow the present tokens, without
/// places, so that the work is the same for every batch of a size.
fn by_token(tokens: &[u32], vocab: usize, out: &mut Vec<u32>) -> usize {
    let mut begins = vec![0u32; vocab + 1];
    for &t in tokens {
        begins[t as usize + 1] += 1;
    }
    let most = tokens.len().min(vocab);
    let (mut ids, absent): (Vec<u32>, Vec<u32>) =
        (0..vocab as u32).partition(|t| begins[*t as usize + 1] > 0);
    let present = ids.len();
    ids.extend(&absent[..most - present]);
    for i in 0..vocab {
        begins[i + 1] += begins[i];
    }
    out.clear();
    out.resize(tokens.len(), 0);
    let starts: Vec<u32> = ids[..present].iter().map(|t| begins[*t as usize]).collect();
    for (place, &t) in tokens.iter().enumerate() {
        let next = &mut begins[t as usize];
        out[*next as usize] = place as u32;
        *next += 1;
    }
    out.extend(&starts);
    out.resize(tokens.len() + most + 1, tokens.len() as u32);
    out.extend(&ids);
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_ordered_by_their_token() {
        let mut out = Vec::new();
        assert_eq!(by_token(&[3, 1, 3, 0, 3], 4, &mut out), 4);
        assert_eq!(out, [3, 1, 0, 2, 4, 0, 1, 2, 5, 5, 0, 1, 3, 2]);
        assert_eq!(by_token(&[1, 1], 7, &mut out), 2);
        assert_eq!(out, [0, 1, 0, 2, 2, 1, 0]);
    }
}
