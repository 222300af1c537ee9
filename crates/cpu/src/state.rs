//! What a session keeps on this device: KV cache, convolution history, delta state, tokens; and its copies.

use std::io::{Read, Write};

use half::bf16;
use lily_backend::export::{CheckSum, read};
use lily_backend::{Error, Result, SamplingParams, Ticket};
use lily_model::Shape;

use crate::device::Buffer;
use crate::kernels::attention::{self, Kv};

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    /// As computed.
    F32,
    /// Rounded to nearest even: half the memory and half the traffic of long contexts.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 => 2,
        }
    }
}

/// Keys or values of all attention layers, `[layer, kv head, capacity, 256]`. A plane of a head occupies whole pages: 2 MB
/// from its first token on, 4096 tokens in BF16, which are 80 MB for all planes of the full-size model.
enum Cache {
    F32(Buffer<f32>),
    /// Two values to a word, the even one in its low half.
    Bf16(Buffer<u32>),
}

/// Geometry of a cache.
#[derive(Clone, Copy)]
struct Planes {
    heads: usize,
    capacity: usize,
}

const D: usize = Shape::HEAD_DIM;

impl Cache {
    fn new(dtype: KvDtype, len: usize) -> Result<Cache> {
        Ok(match dtype {
            KvDtype::F32 => Cache::F32(Buffer::zeroed("KV cache", len)?),
            KvDtype::Bf16 => Cache::Bf16(Buffer::zeroed("KV cache", len / 2)?),
        })
    }

    /// Copies the first `tokens` rows of every plane.
    fn copy_from(&mut self, from: &Cache, own: Planes, others: Planes, tokens: usize) {
        fn copy<T: Copy>(to: &mut [T], from: &[T], own: Planes, others: Planes, tokens: usize, row: usize) {
            let planes = to.chunks_exact_mut(own.capacity * row).zip(from.chunks_exact(others.capacity * row));
            planes.for_each(|(to, from)| to[..tokens * row].copy_from_slice(&from[..tokens * row]));
        }
        match (self, from) {
            (Cache::F32(to), Cache::F32(from)) => copy(to, from, own, others, tokens, D),
            (Cache::Bf16(to), Cache::Bf16(from)) => copy(to, from, own, others, tokens, D / 2),
            _ => unreachable!("all states of a backend have one KV dtype"),
        }
    }
}

/// One session's state.
pub(crate) struct State {
    planes: Planes,
    keys: Cache,
    values: Cache,
    /// `[delta layer, 3, conv width]`.
    conv: Buffer<f32>,
    /// `[delta layer, value head, 128, 128]`.
    delta: Buffer<f32>,
    conv_len: usize,
    delta_len: usize,
    /// Ids of all tokens fed.
    pub(crate) tokens: Vec<u32>,
    /// What the last step sampled, for `PreviousSample`.
    pub(crate) sampled: Option<u32>,
    /// The step whose sampling waits for a mask.
    pub(crate) awaits_mask: Option<Ticket>,
    /// Whether a failed step left it undefined.
    pub(crate) lost: bool,
}

/// A copy of a state's recurrent part.
pub(crate) struct Snapshot {
    tokens: Vec<u32>,
    conv: Buffer<f32>,
    delta: Buffer<f32>,
}

impl Snapshot {
    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        (self.conv.len() + self.delta.len() + self.tokens.len()) * 4
    }
}

impl State {
    /// An empty state with room for `capacity` tokens.
    pub(crate) fn new(shape: &Shape, dtype: KvDtype, capacity: usize) -> Result<State> {
        let kv_len = shape.attention_layers() * shape.kv_width() * capacity;
        let (conv_len, delta_len) = (shape.conv_state_len(), shape.delta_state_len());
        Ok(State {
            planes: Planes { heads: shape.kv_heads, capacity },
            keys: Cache::new(dtype, kv_len)?,
            values: Cache::new(dtype, kv_len)?,
            conv: Buffer::zeroed("convolution history", shape.delta_layers() * conv_len)?,
            delta: Buffer::zeroed("delta state", shape.delta_layers() * delta_len)?,
            conv_len,
            delta_len,
            tokens: Vec::new(),
            sampled: None,
            awaits_mask: None,
            lost: false,
        })
    }

    /// Tokens it has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.planes.capacity
    }

    /// Tokens fed so far.
    pub(crate) fn position(&self) -> usize {
        self.tokens.len()
    }

    /// Bytes it reserves, touched or not.
    pub(crate) fn bytes(&self) -> usize {
        let cache = |c: &Cache| match c {
            Cache::F32(b) => b.bytes(),
            Cache::Bf16(b) => b.bytes(),
        };
        cache(&self.keys) + cache(&self.values) + self.conv.bytes() + self.delta.bytes()
    }

    /// History and delta state of the `index`-th delta layer.
    pub(crate) fn delta_layer(&mut self, index: usize) -> (&mut [f32], &mut [f32]) {
        (
            &mut self.conv[index * self.conv_len..][..self.conv_len],
            &mut self.delta[index * self.delta_len..][..self.delta_len],
        )
    }

    /// Keys and values of the `index`-th attention layer.
    pub(crate) fn kv(&mut self, index: usize) -> Kv<'_> {
        let rows = self.planes.heads * self.planes.capacity;
        let rows = index * rows..(index + 1) * rows;
        match (&mut self.keys, &mut self.values) {
            (Cache::F32(keys), Cache::F32(values)) => Kv::F32(attention::Planes {
                keys: &mut keys.as_chunks_mut().0.as_chunks_mut().0[rows.clone()],
                values: &mut values.as_chunks_mut().0.as_chunks_mut().0[rows],
            }),
            (Cache::Bf16(keys), Cache::Bf16(values)) => Kv::Bf16(attention::Planes {
                keys: &mut keys.as_chunks_mut().0.as_chunks_mut().0[rows.clone()],
                values: &mut values.as_chunks_mut().0.as_chunks_mut().0[rows],
            }),
            _ => unreachable!("keys and values have one type"),
        }
    }

    /// Back to position 0. KV rows stay as they are: no one reads them before they are written again.
    pub(crate) fn reset(&mut self) {
        self.conv.fill(0.0);
        self.delta.fill(0.0);
        self.tokens.clear();
        self.settle();
    }

    /// Forgets what the last step left beside the state itself.
    fn settle(&mut self) {
        self.sampled = None;
        self.awaits_mask = None;
        self.lost = false;
    }

    /// Copies the recurrent part.
    pub(crate) fn snapshot(&self) -> Result<Snapshot> {
        Ok(Snapshot {
            tokens: self.tokens.clone(),
            conv: Buffer::copy_of("snapshot", &self.conv)?,
            delta: Buffer::copy_of("snapshot", &self.delta)?,
        })
    }

    /// Goes back to a snapshot of this state's past.
    pub(crate) fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        let position = snapshot.tokens.len();
        if self.tokens.get(..position) != Some(&snapshot.tokens[..]) {
            return Err(Error::BadStep(format!(
                "the snapshot at position {position} is not of this state's past: the tokens fed before differ"
            )));
        }
        self.conv.copy_from_slice(&snapshot.conv);
        self.delta.copy_from_slice(&snapshot.delta);
        self.tokens.truncate(position);
        self.settle();
        Ok(())
    }

    /// Becomes a copy of `from`, which fits.
    pub(crate) fn copy_from(&mut self, from: &State) {
        let tokens = from.position();
        self.keys.copy_from(&from.keys, self.planes, from.planes, tokens);
        self.values.copy_from(&from.values, self.planes, from.planes, tokens);
        self.conv.copy_from_slice(&from.conv);
        self.delta.copy_from_slice(&from.delta);
        self.tokens.clone_from(&from.tokens);
        self.settle();
    }

    /// Advances by `ids`, which fit, with seeded noise for keys and values and the recurrent part as it is. Every plane
    /// has the same noise: what it is does not matter for speed.
    pub(crate) fn feed_noise(&mut self, ids: &[u32], seed: u64) {
        let (rows, capacity) = (self.position()..self.position() + ids.len(), self.capacity());
        let noise = |place: usize| 3f32.sqrt() * (2.0 * SamplingParams::uniform(seed, place) - 1.0);
        let bits = |place: usize| u32::from(bf16::from_f32(noise(place)).to_bits());
        for cache in [&mut self.keys, &mut self.values] {
            match cache {
                Cache::F32(all) => {
                    for plane in all.chunks_exact_mut(capacity * D) {
                        let own = &mut plane[rows.start * D..rows.end * D];
                        own.iter_mut().zip(rows.start * D..).for_each(|(x, place)| *x = noise(place));
                    }
                }
                Cache::Bf16(all) => {
                    for plane in all.chunks_exact_mut(capacity * D / 2) {
                        let own = &mut plane[rows.start * D / 2..rows.end * D / 2];
                        let pairs = own.iter_mut().zip(rows.start * D / 2..);
                        pairs.for_each(|(word, pair)| *word = bits(2 * pair) | bits(2 * pair + 1) << 16);
                    }
                }
            }
        }
        self.tokens.extend(ids);
        self.sampled = None;
    }

    /// Writes the state; `fingerprint` says to which checkpoint and KV dtype it belongs.
    pub(crate) fn export(&self, fingerprint: u64, to: &mut dyn Write) -> Result<()> {
        to.write_all(MAGIC)?;
        for field in [fingerprint, self.position() as u64] {
            to.write_all(&field.to_le_bytes())?;
        }
        let mut sum = CheckSum::new();
        let mut put = |bytes: &[u8]| -> Result<()> {
            sum.add(bytes);
            Ok(to.write_all(bytes)?)
        };
        put_words(&self.tokens, |t| t.to_le_bytes(), &mut put)?;
        put_words(&self.conv, |x| x.to_le_bytes(), &mut put)?;
        put_words(&self.delta, |x| x.to_le_bytes(), &mut put)?;
        let (rows, plane) = (self.position() * D, self.capacity() * D);
        for cache in [&self.keys, &self.values] {
            match cache {
                Cache::F32(all) => {
                    all.chunks_exact(plane).try_for_each(|p| put_words(&p[..rows], |x| x.to_le_bytes(), &mut put))?;
                }
                Cache::Bf16(all) => {
                    let mut planes = all.chunks_exact(plane / 2);
                    planes.try_for_each(|p| put_words(&p[..rows / 2], |x| x.to_le_bytes(), &mut put))?;
                }
            }
        }
        to.write_all(&sum.value().to_le_bytes())?;
        Ok(())
    }

    /// Replaces the state by what [`State::export`] wrote; after an error it is at position 0.
    pub(crate) fn import(&mut self, fingerprint: u64, vocab: usize, from: &mut dyn Read) -> Result<()> {
        self.reset();
        let result = self.read(fingerprint, vocab, from);
        if result.is_err() {
            self.reset();
        }
        result
    }

    fn read(&mut self, fingerprint: u64, vocab: usize, from: &mut dyn Read) -> Result<()> {
        let refuse = |reason: String| Err(Error::BadExport(reason));
        let mut magic = [0; MAGIC.len()];
        read(from, &mut magic)?;
        if magic != *MAGIC {
            return refuse("it is not a state of this version of the CPU backend".into());
        }
        let mut field = || -> Result<u64> {
            let mut bytes = [0; 8];
            read(from, &mut bytes)?;
            Ok(u64::from_le_bytes(bytes))
        };
        if field()? != fingerprint {
            return refuse("it belongs to another checkpoint or another KV dtype".into());
        }
        let position = field()?;
        let position = match usize::try_from(position) {
            Ok(position) if position <= self.capacity() => position,
            _ => return refuse(format!("its {position} tokens do not fit into {}", self.capacity())),
        };
        let mut sum = CheckSum::new();
        let mut get = |bytes: &mut [u8]| -> Result<()> {
            read(from, bytes)?;
            sum.add(bytes);
            Ok(())
        };
        let mut tokens = vec![0u32; position];
        get_words(&mut tokens, u32::from_le_bytes, &mut get)?;
        get_words(&mut self.conv, f32::from_le_bytes, &mut get)?;
        get_words(&mut self.delta, f32::from_le_bytes, &mut get)?;
        let (rows, plane) = (position * D, self.capacity() * D);
        for cache in [&mut self.keys, &mut self.values] {
            match cache {
                Cache::F32(all) => {
                    let mut planes = all.chunks_exact_mut(plane);
                    planes.try_for_each(|p| get_words(&mut p[..rows], f32::from_le_bytes, &mut get))?;
                }
                Cache::Bf16(all) => {
                    let mut planes = all.chunks_exact_mut(plane / 2);
                    planes.try_for_each(|p| get_words(&mut p[..rows / 2], u32::from_le_bytes, &mut get))?;
                }
            }
        }
        let mut stored = [0; 8];
        read(from, &mut stored)?;
        if u64::from_le_bytes(stored) != sum.value() {
            return refuse("its checksum is wrong: the data was damaged".into());
        }
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return refuse(format!("token {id} is outside the vocabulary of {vocab}"));
        }
        self.tokens = tokens;
        Ok(())
    }
}

/// First bytes of an export: what it is and the version of its layout.
const MAGIC: &[u8; 16] = b"lily-cpu-state 1";
/// Words converted at a time.
const WORDS: usize = 4096;

fn put_words<T: Copy, const N: usize>(
    words: &[T],
    bytes: impl Fn(T) -> [u8; N],
    put: &mut impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut room = [[0; N]; WORDS];
    for words in words.chunks(WORDS) {
        let room = &mut room[..words.len()];
        room.iter_mut().zip(words).for_each(|(room, word)| *room = bytes(*word));
        put(room.as_flattened())?;
    }
    Ok(())
}

fn get_words<T, const N: usize>(
    words: &mut [T],
    value: impl Fn([u8; N]) -> T,
    get: &mut impl FnMut(&mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut room = [[0; N]; WORDS];
    for words in words.chunks_mut(WORDS) {
        let room = &mut room[..words.len()];
        get(room.as_flattened_mut())?;
        words.iter_mut().zip(room).for_each(|(word, room)| *word = value(*room));
    }
    Ok(())
}
