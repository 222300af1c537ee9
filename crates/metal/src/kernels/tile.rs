//! In which form products of many tokens are compiled: for tensor units, where the device has them and shows that they are exact,
//! else for matrices of the simdgroup. A kernel whose first form is not taken runs in the second, and it is written down.

use lily_backend::Result;

use super::gemm::TILE_OUTPUTS;
use super::{Builder, File, KernelReport, Matrix, THREADS};
use crate::device::{
    Bound, Dispatch, Gpu, KernelSpec, Language, Pass, Pipeline, Slice, device_error, float_bytes, read_words,
};

const KERNELS: (&str, &str) = ("gemm.metal", include_str!("gemm.metal"));

const SIMDGROUP: File<'static> = File {
    name: "gemm.metal",
    language: Language::Metal3_2,
    parts: &[("tile_simdgroup.metal", include_str!("tile_simdgroup.metal")), KERNELS],
};

const TENSOR: File<'static> = File {
    name: "gemm.metal for tensor units",
    language: Language::Metal4_0,
    parts: &[("tile_tensor.metal", include_str!("tile_tensor.metal")), KERNELS],
};

/// What runs where tensor units do not.
const INSTEAD: &str = "matrices of the simdgroup";

/// A kernel of gemm.metal.
pub(super) fn pipeline(builder: &mut Builder<'_>, spec: &KernelSpec<'_>) -> Result<Pipeline> {
    if has_tensor_units(builder) {
        let made = builder.compile(&TENSOR, spec);
        builder.report(&TENSOR, spec, made.as_ref().err(), made.is_err().then_some(INSTEAD));
        if made.is_ok() {
            return made;
        }
    }
    builder.pipeline_of(&SIMDGROUP, *spec)
}

/// Asks the device once.
fn has_tensor_units(builder: &mut Builder<'_>) -> bool {
    if let Some(known) = builder.tensor_units {
        return known;
    }
    let found = builder.gpu.tensor_units().and_then(|()| try_out(builder).map_err(|error| error.to_string()));
    if let Err(why) = &found {
        let name = "products on tensor units".into();
        builder.reports.push(KernelReport { name, error: Some(why.clone()), instead: Some(INSTEAD) });
    }
    *builder.tensor_units.insert(found.is_ok())
}

impl Builder<'_> {
    /// How products are made, for the name of a device: nothing where it has no tensor units.
    pub(crate) fn products(&self) -> Option<String> {
        let missed = self.reports.iter().filter(|report| report.instead.is_some());
        match (self.tensor_units, missed.count()) {
            (None, _) => None,
            (Some(true), 0) => Some("tensor units".into()),
            (Some(true), missed) => Some(format!("tensor units but for {missed} kernels")),
            (Some(false), _) => self.gpu.tensor_units().ok().map(|()| "tensor units not used".into()),
        }
    }
}

// ---- the trial ----
//
// The form for tensor units is exact if they multiply halves exactly and lose nothing of sums of whole numbers up to 2^24. Then a
// few plain operations of f32 in a known order make the result, and a host that does the same has the same bits.

/// Tokens of the trial: a tile of each height.
const TOKENS: [usize; 3] = [64, 32, 16];
/// Outputs and inputs: one tile and a part of one, two groups.
const SIZES: [usize; 2] = [70, 128];
/// Columns that share a scale.
const GROUP: usize = lily_model::Shape::GROUP;

/// Multiplies on the device, and holds the result against the host's, bit by bit.
fn try_out(builder: &mut Builder<'_>) -> Result<()> {
    let [outputs, inputs] = SIZES;
    let constants = [("INPUTS", inputs), ("OUTPUTS", outputs), ("SPLIT", outputs)];
    let pipeline =
        builder.compile(&TENSOR, &KernelSpec { kernel: "gemm_q4", constants: &constants, threads: THREADS })?;
    let mut memory = Vec::new();
    let different = Trial::new().count_differences(builder.gpu, pipeline, &mut memory);
    memory.into_iter().for_each(|slice: Slice| builder.gpu.free(slice.buffer));
    match different? {
        0 => Ok(()),
        n => Err(device_error(format!("{n} of {} products are not exact", TOKENS.iter().sum::<usize>() * outputs))),
    }
}

/// A buffer with these bytes; `memory` is what is to be freed.
fn place(gpu: &mut dyn Gpu, memory: &mut Vec<Slice>, bytes: &[u8]) -> Result<Slice> {
    let slice = Slice { buffer: gpu.buffer(bytes.len(), "a trial")?, offset: 0, bytes: bytes.len() };
    memory.push(slice);
    gpu.write(slice, bytes)?;
    Ok(slice)
}

/// A matrix and rows whose products tell exact sums from others.
struct Trial {
    /// `[outputs, inputs]`, one a byte.
    codes: Vec<u8>,
    /// `[outputs, groups]`, BF16.
    scales: Vec<u16>,
    biases: Vec<u16>,
    /// `[tokens, inputs]`.
    x: Vec<f32>,
}

impl Trial {
    /// All bits of x and all codes occur; some rows of codes have the largest or the smallest one only.
    fn new() -> Trial {
        let [outputs, inputs] = SIZES;
        let mut seed = 1u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 8
        };
        let codes = (0..outputs * inputs).map(|i| match i / inputs {
            0 => 15,
            1 => 0,
            _ => (random() % 16) as u8,
        });
        let codes = codes.collect();
        // Between 1 and 2, and so are x, of either sign, but for their exponents.
        let mut bf16 = |_| (0x3f80 + (random() % 128) as u16) | ((random() % 2) as u16) << 15;
        let [scales, biases] = [(); 2].map(|()| (0..outputs * inputs / GROUP).map(&mut bf16).collect());
        let x = (0..TOKENS[0] * inputs).map(|i| {
            let mantissa = if i / inputs == 0 { 0x7f_ffff } else { random() & 0x7f_ffff };
            let sign = if i / inputs == 0 { 0 } else { random() % 2 };
            f32::from_bits(sign << 31 | (120 + random() % 8) << 23 | mantissa)
        });
        let x = x.collect();
        Trial { codes, scales, biases, x }
    }

    /// How many products come out otherwise than on the host.
    fn count_differences(&self, gpu: &mut dyn Gpu, pipeline: Pipeline, memory: &mut Vec<Slice>) -> Result<usize> {
        let [outputs, inputs] = SIZES;
        let words = |values: &[u16]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
        let packed: Vec<u8> = self.codes.as_chunks().0.iter().map(|[low, high]| low | high << 4).collect();
        let matrix = Matrix {
            codes: place(gpu, memory, &packed)?,
            scales: place(gpu, memory, &words(&self.scales))?,
            biases: place(gpu, memory, &words(&self.biases))?,
        };
        let x = place(gpu, memory, &float_bytes(&self.x))?;
        let mut different = 0;
        for tokens in TOKENS {
            let y = place(gpu, memory, &vec![0xff; 4 * tokens * outputs])?;
            let mut bound = matrix.bound().to_vec();
            bound.extend([Bound::Read(x.part(0, 4 * tokens * inputs)), Bound::Write(y), Bound::word(tokens)]);
            let mut pass = Pass::default();
            let groups = [outputs.div_ceil(TILE_OUTPUTS), 1];
            pass.dispatch(Dispatch { pipeline, bound, groups, threads: THREADS });
            if let Some(commit) = pass.commit(gpu)? {
                gpu.wait(commit)?;
            }
            let found = read_words(gpu, y, u32::from_le_bytes)?;
            let expected = self.products().map(f32::to_bits);
            different += found.iter().zip(expected).filter(|(found, expected)| **found != *expected).count();
        }
        Ok(different)
    }

    /// The products row by row, as tile_tensor.metal makes them.
    fn products(&self) -> impl Iterator<Item = f32> {
        let [outputs, inputs] = SIZES;
        let groups = inputs / GROUP;
        self.x.chunks_exact(inputs).flat_map(move |row| {
            let row: Vec<RowGroup> = row.chunks_exact(GROUP).map(RowGroup::new).collect();
            (0..outputs).map(move |output| {
                row.iter().enumerate().fold(0.0, |sum: f32, (g, x)| {
                    let at = output * groups + g;
                    let [scale, bias] =
                        [&self.scales, &self.biases].map(|all| f32::from_bits(u32::from(all[at]) << 16));
                    let codes = &self.codes[at * GROUP..(at + 1) * GROUP];
                    let [upper, lower] = [&x.upper, &x.lower]
                        .map(|x| x.iter().zip(codes).map(|(x, code)| x * (f32::from(*code) - 8.0)).sum::<f32>());
                    let sum = x.sum.mul_add(8.0f32.mul_add(scale, bias), sum);
                    let sum = (x.unit * UPPER * scale).mul_add(upper, sum);
                    (x.unit * scale).mul_add(lower, sum)
                })
            })
        })
    }
}

/// As tile_tensor.metal has it.
const UPPER: f32 = 4096.0;

/// A group of a row of x as whole numbers of units.
struct RowGroup {
    unit: f32,
    upper: Vec<f32>,
    lower: Vec<f32>,
    sum: f32,
}

impl RowGroup {
    fn new(x: &[f32]) -> RowGroup {
        let exponent = x.iter().map(|x| x.abs().to_bits() >> 23).max().unwrap_or(0).max(23);
        let [unit, per_unit] = [exponent - 22, 276 - exponent].map(|exponent| f32::from_bits(exponent << 23));
        let (upper, lower): (Vec<f32>, Vec<f32>) = x
            .iter()
            .map(|x| {
                let whole = (x * per_unit).round_ties_even();
                let upper = (whole / UPPER).round_ties_even();
                (upper, whole - upper * UPPER)
            })
            .unzip();
        let sum = UPPER.mul_add(upper.iter().sum(), lower.iter().sum()) * unit;
        RowGroup { unit, upper, lower, sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_whole_numbers_of_halves_and_off_by_half_a_unit_at_most() {
        let edges: [&[f32]; 7] = [
            &[0.0; 64],
            &[f32::MAX, -f32::MAX, 1.0, f32::MIN_POSITIVE],
            &[1.0, -1.0, 0.999_999_94, 1.000_000_1],
            &[1.999_999_9, -1.999_999_9, 1e-7, -3e-8],
            &[65_504.0, 1e5, -7.25, 0.1],
            &[1e-40, -1e-45, 0.0, 3e-39],
            &[1e-30, 7e-31, -2e-33, 1e-36],
        ];
        for x in edges {
            let group = RowGroup::new(x);
            let largest = x.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
            assert!(group.unit <= largest * 2f32.powi(-22) || largest < 1e-30, "{x:?}: {}", group.unit);
            for ((x, upper), lower) in x.iter().zip(&group.upper).zip(&group.lower) {
                assert!(upper.abs() <= 2048.0 && lower.abs() <= 2048.0 && upper.fract() == 0.0 && lower.fract() == 0.0);
                let kept = f64::from(upper * UPPER + lower) * f64::from(group.unit);
                assert!((kept - f64::from(*x)).abs() <= f64::from(group.unit) / 2.0, "{x}: {kept}");
            }
        }
    }

    /// The trial asks for what a product is: scales and biases, signs and places are right.
    #[test]
    fn the_products_of_the_trial_are_products() {
        let trial = Trial::new();
        let [outputs, inputs] = SIZES;
        let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
        for (i, found) in trial.products().enumerate() {
            let (row, output) = (i / outputs, i % outputs);
            let (mut expected, mut size) = (0.0, 0.0);
            for k in 0..inputs {
                let at = (output * inputs + k) / GROUP;
                let code = f64::from(trial.codes[output * inputs + k]);
                let x = f64::from(trial.x[row * inputs + k]);
                expected += x * (value(trial.scales[at]) * code + value(trial.biases[at]));
                size += x.abs() * (value(trial.scales[at]).abs() * 15.0 + value(trial.biases[at]).abs());
            }
            assert!((f64::from(found) - expected).abs() < size * 1e-7, "{row}, {output}: {found} and {expected}");
        }
    }
}
