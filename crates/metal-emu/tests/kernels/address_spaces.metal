#include <metal_stdlib>
using namespace metal;
inline float first(threadgroup const float* x) { return x[0]; }
kernel void device_as_threadgroup(device const float* x [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = first(x); }
