// Rows of heads as lanes hold them, 8 of 256 dimensions each, and what becomes of queries and keys before they meet. For kernels
// of one token and of many.

constant uint DIMS = HEAD_DIM / LANES;
static_assert(DIMS == 8 && ROTARY_DIM == 64, "RoPE pairs lane l < 4 with lane l + 4");

// A lane's part of a row.
struct Part {
  float4 low;
  float4 high;
};

inline float dot_parts(Part a, Part b) { return dot(a.low, b.low) + dot(a.high, b.high); }

inline Part load_part(device const float* from) {
  const Part part = {*(device const float4*)from, *(device const float4*)(from + 4)};
  return part;
}

inline Part load_part(device const ushort* from) {
  const uint4 pairs = *(device const uint4*)from;
  const uint4 even = pairs << 16, odd = pairs & 0xffff0000u;
  const Part part = {float4(as_type<float>(even.x), as_type<float>(odd.x), as_type<float>(even.y), as_type<float>(odd.y)),
                     float4(as_type<float>(even.z), as_type<float>(odd.z), as_type<float>(even.w), as_type<float>(odd.w))};
  return part;
}

// To the nearest BF16, to even on ties.
inline uint bf16_bits(float x) {
  const uint bits = as_type<uint>(x);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Writes a part and returns what reading it would give.
inline Part store_part(device float* to, Part part, bool writes) {
  if (writes) {
    *(device float4*)to = part.low;
    *(device float4*)(to + 4) = part.high;
  }
  return part;
}

inline Part store_part(device ushort* to, Part part, bool writes) {
  const uint4 even = uint4(bf16_bits(part.low.x), bf16_bits(part.low.z), bf16_bits(part.high.x), bf16_bits(part.high.z));
  const uint4 odd = uint4(bf16_bits(part.low.y), bf16_bits(part.low.w), bf16_bits(part.high.y), bf16_bits(part.high.w));
  if (writes) *(device uint4*)to = even | (odd << 16);
  const Part rounded = {float4(as_type<float>(even.x << 16), as_type<float>(odd.x << 16), as_type<float>(even.y << 16), as_type<float>(odd.y << 16)),
                        float4(as_type<float>(even.z << 16), as_type<float>(odd.z << 16), as_type<float>(even.w << 16), as_type<float>(odd.w << 16))};
  return rounded;
}

// rms_norm of a head, then RoPE of its first ROTARY_DIM dimensions.
inline Part norm_and_rotate(Part x, device const float* weight, device const float2* angles, ushort lane) {
  const float scale = rsqrt(sum_lanes(dot_parts(x, x)) / float(HEAD_DIM) + RMS_EPS);
  const Part w = load_part(weight + lane * DIMS);
  x.low = x.low * scale * w.low;
  x.high = x.high * scale * w.high;
  const Part partner = {simd_shuffle_xor(x.low, ushort(4)), simd_shuffle_xor(x.high, ushort(4))};
  if (lane * DIMS >= ROTARY_DIM) return x;
  device const float2* own = angles + lane % 4 * DIMS;
  const float sign = lane < 4 ? -1.0f : 1.0f;
  const float4 cos_low = float4(own[0].x, own[1].x, own[2].x, own[3].x), sin_low = float4(own[0].y, own[1].y, own[2].y, own[3].y);
  const float4 cos_high = float4(own[4].x, own[5].x, own[6].x, own[7].x), sin_high = float4(own[4].y, own[5].y, own[6].y, own[7].y);
  const Part rotated = {x.low * cos_low + partner.low * sin_low * sign, x.high * cos_high + partner.high * sin_high * sign};
  return rotated;
}
