//! RoPE on the first 64 dimensions of a head, in half-split pairs.
//! Reference: `lily_reference::ops::rope`.

use lily_model::Shape;

/// Pairs of a head that are rotated.
pub(crate) const PAIRS: usize = Shape::ROTARY_DIM / 2;

/// Cosine and sine of one position's angles.
#[derive(Clone, Copy)]
pub(crate) struct Angles {
    cos: [f32; PAIRS],
    sin: [f32; PAIRS],
}

impl Angles {
    /// The angles `position * theta^(-i/32)`, made in f64: in f32 they would be off by 1e-2 rad at the longest contexts.
    pub(crate) fn at(position: usize, theta: f64) -> Angles {
        let mut angles = Angles { cos: [0.0; PAIRS], sin: [0.0; PAIRS] };
        for i in 0..PAIRS {
            let angle = position as f64 * theta.powf(-(i as f64) / PAIRS as f64);
            (angles.cos[i], angles.sin[i]) = (angle.cos() as f32, angle.sin() as f32);
        }
        angles
    }

    /// Rotates a head in place: `(x_i, x_{i+32}) -> (x_i cos - x_{i+32} sin, x_{i+32} cos + x_i sin)`.
    #[inline(always)]
    pub(crate) fn rotate(&self, head: &mut [f32]) {
        let (first, rest) = head.split_at_mut(PAIRS);
        for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(&self.cos).zip(&self.sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
