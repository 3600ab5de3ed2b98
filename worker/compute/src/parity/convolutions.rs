//! Convolution blocks against their plain version.

use super::{Bench, Suite, wide};
use crate::{
    error::Result,
    reference::{self as plain, Images},
    shape::{ConvBlockAt, ConvBlockShape, ConvShape, LinearAt, LinearShape},
};

impl<D: Bench> Suite<'_, D> {
    /// Two convolution blocks and a linear layer, as in the ConvNet.
    pub(super) fn convolutions(&mut self, n: usize, side: usize, channels: [usize; 2]) -> Result {
        let name = format!("convolution blocks of {channels:?} channels, {n} images of {side} x {side}");
        let [one, two] = [(1, channels[0]), (channels[0], channels[1])].map(|(inputs, outputs)| ConvShape {
            inputs,
            outputs,
            kernel: 5,
            pad: 2,
        });
        let params_len = |c: ConvShape| c.weight_len() + 3 * c.outputs;
        let (first_at, second_at) = (0, params_len(one));
        let buffers = second_at + params_len(two);
        let len = buffers + 2 * (one.outputs + two.outputs);
        let mut p: Vec<f32> = self.noise(len).iter().map(|v| v * 0.3).collect();
        // Gains around one, and variances above zero.
        for (conv, at, running) in [(one, first_at, buffers), (two, second_at, buffers + 2 * one.outputs)] {
            let gamma = at + conv.weight_len() + conv.outputs;
            p[gamma..gamma + conv.outputs].iter_mut().for_each(|v| *v += 1.0);
            p[running + conv.outputs..running + 2 * conv.outputs].iter_mut().for_each(|v| *v = v.abs() + 0.5);
        }
        let held = self.d.hold(&p)?;
        let images = self.noise(n * side * side);
        let mut x = self.d.images(1, side, side, 2);
        self.d.load_images(&images, n, &mut x)?;
        let at = |params, buffers| ConvBlockAt { params, buffers };
        let shape = |conv, side, border, input_gradient| ConvBlockShape {
            conv,
            height: side,
            width: side,
            border,
            input_gradient,
        };
        let mut first = self.d.conv_block(shape(one, side, 2, false), at(first_at, buffers));
        let mut second =
            self.d.conv_block(shape(two, side / 2, 0, true), at(second_at, buffers + 2 * one.outputs));
        let features = two.outputs * (side / 4) * (side / 4);
        let linear = LinearShape { n, inputs: features, outputs: 3 };
        let head = self.noise(linear.weight_len() + 3);
        let head_held = self.d.hold(&head)?;
        let head_at = LinearAt { weight: 0, bias: Some(linear.weight_len()) };
        let dy = self.noise(n * 3);
        let dyv = self.values(&dy)?;
        let mut y = D::Values::default();
        for train in [false, true] {
            self.d.conv_block_forward(&mut first, &x, n, D::params(&held), train)?;
            let out = D::conv_block_output(&first);
            self.d.conv_block_forward(&mut second, out, n, D::params(&held), train)?;
            self.d.image_linear(linear, &second, D::params(&head_held), head_at, &mut y)?;
            let want = plain_net(&p, &head, [one, two], (n, side), &images, train, &[]).0;
            self.check_values(format!("{name}, train {train}"), &y, &want)?;
        }
        let (_, want, want_head) = plain_net(&p, &head, [one, two], (n, side), &images, true, &wide(&dy));
        let (mut gradient, mut head_gradient) = (self.d.poisoned(len)?, self.d.poisoned(head.len())?);
        let params = D::params(&held);
        let grads = D::grads(&mut gradient);
        self.d.conv_block_buffers(&first, params, grads)?;
        self.d.conv_block_buffers(&second, params, grads)?;
        self.d.image_linear_backward_weight(linear, &second, &dyv, head_at, D::grads(&mut head_gradient))?;
        self.d.image_linear_backward_input(linear, &dyv, D::params(&head_held), head_at, &mut second)?;
        self.d.conv_block_backward_norm(&mut second, n, params, grads)?;
        self.d.conv_block_backward_weight(&mut second, D::conv_block_output(&first), n, params, grads)?;
        self.d.conv_block_backward_input(&mut second, n, params, &mut first)?;
        self.d.conv_block_backward_norm(&mut first, n, params, grads)?;
        self.d.conv_block_backward_weight(&mut first, &x, n, params, grads)?;
        let got = self.d.read_grads(&gradient)?;
        // Tensor by tensor, or the largest would hide the others. A convolution's bias before a norm has no
        // gradient.
        let mut from = 0;
        for (block, conv) in [("first", one), ("second", two)] {
            for (tensor, len) in [
                ("weight", conv.weight_len()),
                ("bias", conv.outputs),
                ("gamma", conv.outputs),
                ("beta", conv.outputs),
            ] {
                if tensor != "bias" {
                    let part = from..from + len;
                    let what = format!("{name}, {block} {tensor}");
                    self.check_behind_maxima(what, &got[part.clone()], &want[part]);
                }
                from += len;
            }
        }
        self.check(format!("{name}, running statistics"), &got[buffers..], &want[buffers..]);
        let got = self.d.read_grads(&head_gradient)?;
        self.check(format!("{name}, the linear layer"), &got, &want_head);
        Ok(())
    }
}

/// The plain net of [`Suite::convolutions`]: its output, and for `dy` the gradients of both vectors.
fn plain_net(
    p: &[f32],
    head: &[f32],
    convs: [ConvShape; 2],
    (n, side): (usize, usize),
    images: &[f32],
    train: bool,
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let p = wide(p);
    let mut sizes = Images { n, channels: 1, height: side, width: side };
    let mut x = wide(images);
    let mut at = 0;
    let mut running: usize = convs.iter().map(|c| c.weight_len() + 3 * c.outputs).sum();
    let mut grads = vec![0.0; p.len()];
    let mut kept = Vec::new();
    for conv in convs {
        let c = conv.outputs;
        let weight = at..at + conv.weight_len();
        let [bias, gamma, beta] = [0, 1, 2].map(|i| weight.end + i * c..weight.end + (i + 1) * c);
        at = beta.end;
        let wide = sizes.after(conv);
        let y = plain::conv_forward(conv, sizes, &x, &p[weight.clone()], &p[bias.clone()]);
        let count = (n * wide.height * wide.width) as f64;
        let mut stats = plain::channel_stats(wide, &y);
        let momentum = f64::from(crate::cpu::norm::MOMENTUM);
        for (i, (mean, var)) in stats.iter_mut().enumerate() {
            let (old_mean, old_var) = (p[running + i], p[running + c + i]);
            grads[running + i] = momentum * (old_mean - *mean);
            grads[running + c + i] = momentum * (old_var - *var * count / (count - 1.0).max(1.0));
            if !train {
                (*mean, *var) = (old_mean, old_var);
            }
        }
        running += 2 * c;
        let z = plain::norm(wide, &y, &stats, &p[gamma.clone()], &p[beta.clone()]);
        let (pooled, places) = plain::relu_pool(wide, &z);
        kept.push((
            conv,
            sizes,
            wide,
            std::mem::replace(&mut x, pooled.clone()),
            y,
            pooled,
            places,
            [weight, bias, gamma, beta],
        ));
        sizes = wide.halved();
    }
    let features = x.len() / n;
    let outputs = head.len() / (features + 1);
    let (weight, bias) = head.split_at(features * outputs);
    let head = (wide(weight), wide(bias));
    let out = plain::linear_forward(n, &x, &head.0, &head.1);
    if dy.is_empty() {
        return (out, grads, Vec::new());
    }
    let (mut dx, dw, db) = plain::linear_backward(n, &x, &head.0, dy);
    for (conv, sizes, wide, x, y, pooled, places, [weight, bias, gamma, beta]) in kept.into_iter().rev() {
        let dz = plain::relu_pool_backward(wide.len(), &pooled, &places, &dx);
        let (dconv, dgamma, dbeta) = plain::norm_backward(wide, &y, &p[gamma.clone()], &dz);
        grads[gamma].copy_from_slice(&dgamma);
        grads[beta].copy_from_slice(&dbeta);
        let (d, dweight, dbias) = plain::conv_backward(conv, sizes, &x, &p[weight.clone()], &dconv);
        grads[weight].copy_from_slice(&dweight);
        grads[bias].copy_from_slice(&dbias);
        dx = d;
    }
    (out, grads, [dw, db].concat())
}
