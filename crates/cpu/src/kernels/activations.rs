//! Inputs of linears: 16-bit fixed point with a scale per group of 64.
//!
//! [`Activations`]. In: f32 `[tokens, width]`. Out: the same as `scale_g * q_i` with `|q_i| <= 32512` and the sums
//! `scale_g * sum_i q_i`. The work of one call is a piece of one token.
//!
//! A value is off by at most `max / 65024` of its group, 2.4e-5 of the length of a Gaussian vector, which is what makes
//! products of codes and inputs sums of small integers: exact, and several times as many a cycle as f32. Sums are those
//! of the rounded values, so that the error of an input meets `code * scale + bias` and not the bias alone.

use lily_backend::Result;
use lily_model::Shape;

use super::{LANES, kernel};
use crate::device::{Buffer, Isa, Parts, Pool, with_scratch};

/// Inputs of a group.
pub(crate) const GROUP: usize = Shape::GROUP;
/// Largest magnitude of a fixed-point value: 127 * 256, so that it also splits into two signed bytes.
const LARGEST: f32 = 32512.0;
/// Values that keep rows from lying a power of two apart, where they would fight for the same lines of the first-level
/// cache.
const ROW_GAP: usize = 32;

/// How the values of a group lie in its 128 bytes: as the codes do that an instruction set multiplies at a time.
#[derive(Clone, Copy)]
enum Order {
    /// 16-bit values. Column `8 v + e + 4 h` (`v < 8`, `e < 4`, `h < 2`) stands at `16 e + 2 v + h`: a 32-bit word of eight
    /// 4-bit codes, shifted by `4 e` and masked, has the codes of columns `e` and `e + 4` in its halves.
    Words,
    /// Values taken apart into signed bytes, `256 high + low`: all high ones, then all low ones, each those of even columns
    /// before those of odd ones.
    #[cfg(target_arch = "x86_64")]
    Halves,
    /// Bytes likewise, as [`Order::byte`] says in runs of 16, a register.
    #[cfg(target_arch = "aarch64")]
    Bytes16,
    /// The same in runs of 8, a register with the high and the low bytes of the same columns.
    #[cfg(target_arch = "aarch64")]
    Bytes8,
}

impl Order {
    fn of(isa: Isa) -> Order {
        match isa {
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => Order::Bytes16,
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => Order::Bytes8,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => Order::Halves,
            _ => Order::Words,
        }
    }

    /// Where column `i` stands among the values of [`Order::Words`].
    const fn word(i: usize) -> usize {
        16 * (i % 4) + 2 * (i / 8) + i / 4 % 2
    }

    /// Where the high byte of column `i` stands if the low one follows `LOW` bytes later. Of `2 LOW` columns the even ones
    /// make a run and the odd ones the next: `LOW` bytes of 4-bit codes, masked and shifted. Where that would be more than
    /// a group, high bytes come before low ones.
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    const fn byte<const LOW: usize>(i: usize) -> usize {
        if LOW == GROUP {
            return GROUP / 2 * (i % 2) + i / 2;
        }
        let (columns, i) = (i / (2 * LOW), i % (2 * LOW));
        2 * LOW * (2 * columns + i % 2) + i / 2
    }

    /// Writes a group.
    #[inline(always)]
    fn write(self, q: &[i32; GROUP], values: &mut [i16; GROUP]) {
        match self {
            // Words v, then planes e: as `word` says.
            Order::Words => {
                for v in 0..GROUP / 8 {
                    for e in 0..4 {
                        values[16 * e + 2 * v] = q[8 * v + e] as i16;
                        values[16 * e + 2 * v + 1] = q[8 * v + e + 4] as i16;
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Order::Halves => write_bytes::<GROUP>(q, values),
            #[cfg(target_arch = "aarch64")]
            Order::Bytes16 => write_bytes::<16>(q, values),
            #[cfg(target_arch = "aarch64")]
            Order::Bytes8 => write_bytes::<8>(q, values),
        }
    }

    /// Column `i` of a group.
    fn read(self, values: &[i16; GROUP], i: usize) -> i16 {
        match self {
            Order::Words => values[Order::word(i)],
            #[cfg(target_arch = "x86_64")]
            Order::Halves => read_bytes::<GROUP>(values, i),
            #[cfg(target_arch = "aarch64")]
            Order::Bytes16 => read_bytes::<16>(values, i),
            #[cfg(target_arch = "aarch64")]
            Order::Bytes8 => read_bytes::<8>(values, i),
        }
    }
}

#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
#[inline(always)]
fn write_bytes<const LOW: usize>(q: &[i32; GROUP], values: &mut [i16; GROUP]) {
    let mut bytes = [0; 2 * GROUP];
    for (i, q) in q.iter().enumerate() {
        let low = *q as i8;
        let at = Order::byte::<LOW>(i);
        bytes[at] = ((q - i32::from(low)) >> 8) as u8;
        bytes[at + LOW] = low as u8;
    }
    for (value, pair) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = i16::from_ne_bytes(*pair);
    }
}

#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
fn read_bytes<const LOW: usize>(values: &[i16; GROUP], i: usize) -> i16 {
    let byte = |at: usize| i16::from(values[at / 2].to_ne_bytes()[at % 2] as i8);
    let at = Order::byte::<LOW>(i);
    256 * byte(at) + byte(at + LOW)
}

/// One token's inputs.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// `[groups, 64]`, a group in the [`Order`] of the instruction set that it was made for.
    pub(crate) values: &'a [i16],
    /// `[groups]`, then zeros to a whole vector.
    pub(crate) scales: &'a [f32],
    /// Likewise.
    pub(crate) sums: &'a [f32],
}

/// Inputs of linears for a number of tokens.
pub(crate) struct Activations {
    width: usize,
    values: Buffer<i16>,
    scales: Buffer<f32>,
    sums: Buffer<f32>,
}

/// Distances of the rows of two tokens.
fn strides(width: usize) -> (usize, usize) {
    (width + ROW_GAP, (width / GROUP).next_multiple_of(LANES))
}

impl Activations {
    /// Room for `tokens` of `width` inputs.
    pub(crate) fn new(tokens: usize, width: usize) -> Result<Activations> {
        let (values, groups) = strides(width);
        Ok(Activations {
            width,
            values: Buffer::zeroed("activations", tokens * values)?,
            scales: Buffer::zeroed("activations", tokens * groups)?,
            sums: Buffer::zeroed("activations", tokens * groups)?,
        })
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.values.bytes() + self.scales.bytes() + self.sums.bytes()
    }

    /// The inputs of one token.
    #[inline(always)]
    pub(crate) fn row(&self, token: usize) -> Inputs<'_> {
        let (values, groups) = strides(self.width);
        Inputs {
            values: &self.values[token * values..][..self.width],
            scales: &self.scales[token * groups..][..groups],
            sums: &self.sums[token * groups..][..groups],
        }
    }

    /// The inputs of one token, filled for `isa`, in f32 and in their own order, for a trace.
    pub(crate) fn plain_row(&self, isa: Isa, token: usize) -> Vec<f32> {
        let Inputs { values, scales, .. } = self.row(token);
        let order = Order::of(isa);
        let groups = values.as_chunks::<GROUP>().0.iter().zip(scales);
        groups.flat_map(|(q, scale)| (0..GROUP).map(move |i| f32::from(order.read(q, i)) * scale)).collect()
    }

    /// Fills the rows of `tokens` tokens: `make` writes the plain row of a token into the slice that it is given.
    pub(crate) fn fill(&mut self, pool: &Pool, isa: Isa, tokens: usize, make: impl Fn(usize, &mut [f32]) + Sync) {
        self.fill_along(pool, isa, tokens, &mut [], |token, _, plain| make(token, plain));
    }

    /// The same with `along`, `[tokens, any width]`, whose row of the token `make` may change.
    pub(crate) fn fill_along(
        &mut self,
        pool: &Pool,
        isa: Isa,
        tokens: usize,
        along: &mut [f32],
        make: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
    ) {
        let (width, row) = (self.width, along.len() / tokens.max(1));
        let (parts, along) = (self.parts(), Parts::new(along));
        pool.run(tokens.div_ceil(TOKENS_PER_UNIT), |unit| {
            with_scratch(width, |plain| {
                for token in unit * TOKENS_PER_UNIT..tokens.min((unit + 1) * TOKENS_PER_UNIT) {
                    // SAFETY: each token belongs to one unit.
                    make(token, unsafe { along.part(token * row, row) }, plain);
                    // SAFETY: as above.
                    unsafe { parts.arrange(isa, token, 0, plain) };
                }
            });
        });
    }

    /// The rows, for workers that each write columns of their own.
    pub(crate) fn parts(&mut self) -> ActivationParts<'_> {
        ActivationParts {
            width: self.width,
            values: Parts::new(&mut self.values),
            scales: Parts::new(&mut self.scales),
            sums: Parts::new(&mut self.sums),
        }
    }
}

/// Tokens that one worker takes at a time where the work per token is small.
const TOKENS_PER_UNIT: usize = 4;

/// [`Activations`] being written by several workers.
pub(crate) struct ActivationParts<'a> {
    width: usize,
    values: Parts<'a, i16>,
    scales: Parts<'a, f32>,
    sums: Parts<'a, f32>,
}

impl ActivationParts<'_> {
    /// Writes columns `first .. first + plain.len()` of a token, a whole number of groups.
    ///
    /// # Safety
    /// No two workers write the same columns of a token.
    pub(crate) unsafe fn arrange(&self, isa: Isa, token: usize, first: usize, plain: &[f32]) {
        let (values, groups) = strides(self.width);
        let (value, group) = (token * values + first, token * groups + first / GROUP);
        // SAFETY: the caller's promise; groups are whole, so scales and sums are as disjoint as values.
        let (values, scales, sums) = unsafe {
            (
                self.values.part(value, plain.len()),
                self.scales.part(group, plain.len() / GROUP),
                self.sums.part(group, plain.len() / GROUP),
            )
        };
        quantize(isa, Order::of(isa), plain, values, scales, sums);
    }
}

kernel! {
    /// Rounds whole groups; ties to even. A group with a value that is not finite has a scale that is not, so that
    /// whatever it meets is not either.
    fn quantize(order: Order, x: &[f32], values: &mut [i16], scales: &mut [f32], sums: &mut [f32]) = quantize_body;
}

#[inline(always)]
fn quantize_body<const FUSED: bool>(order: Order, x: &[f32], values: &mut [i16], scales: &mut [f32], sums: &mut [f32]) {
    /// Adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let groups = x.as_chunks::<GROUP>().0.iter().zip(values.as_chunks_mut::<GROUP>().0);
    for ((x, values), (scale, sum)) in groups.zip(scales.iter_mut().zip(sums)) {
        let (mut largest, mut zeros) = ([0.0f32; LANES], [0.0f32; LANES]);
        for x in x.as_chunks::<LANES>().0 {
            for i in 0..LANES {
                largest[i] = if x[i].abs() > largest[i] { x[i].abs() } else { largest[i] };
                zeros[i] += x[i] * 0.0;
            }
        }
        let (mut max, mut zero) = (0.0, 0.0);
        for i in 0..LANES {
            max = if largest[i] > max { largest[i] } else { max };
            zero += zeros[i];
        }
        // Below that the inverse would overflow; such values become zero.
        let inverse = if max > 1e-30 { LARGEST / max } else { 0.0 };
        let mut q = [0i32; GROUP];
        let mut total = 0;
        for (q, x) in q.iter_mut().zip(x) {
            // The bits of 2^23 + 2^22 + n end in n as a two's complement number.
            *q = i32::from((x * inverse + ROUND).to_bits() as u16 as i16);
            total += *q;
        }
        order.write(&q, values);
        *scale = max / LARGEST + zero;
        *sum = *scale * total as f32;
    }
}

/// The tokens that take part in a job.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    x: &'a Activations,
    which: Which<'a>,
}

#[derive(Clone, Copy)]
enum Which<'a> {
    Range(usize, usize),
    List(&'a [u32]),
}

impl<'a> Tokens<'a> {
    /// Rows `first .. first + count`.
    pub(crate) fn range(x: &'a Activations, first: usize, count: usize) -> Tokens<'a> {
        Tokens { x, which: Which::Range(first, count) }
    }

    /// The rows that `list` names.
    pub(crate) fn list(x: &'a Activations, list: &'a [u32]) -> Tokens<'a> {
        Tokens { x, which: Which::List(list) }
    }

    /// How many.
    pub(crate) fn len(&self) -> usize {
        match self.which {
            Which::Range(_, count) => count,
            Which::List(list) => list.len(),
        }
    }

    /// Inputs of the `i`-th.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> Inputs<'a> {
        match self.which {
            Which::Range(first, _) => self.x.row(first + i),
            Which::List(list) => self.x.row(list[i] as usize),
        }
    }
}
