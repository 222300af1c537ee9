//! The token pass: what has to be rewritten before clang reads a .metal file, the table of its kernels, and the lints.
//!
//! Rewritten are attributes, function constants and variables in threadgroup memory. No type is parsed: parameters are
//! passed by proxies that convert to whatever a kernel declares, and clang itself fills in the sizes of the table.
//!
//! Kernels, threadgroup variables and function constants must stand in the text as they are, not be made by macros or
//! templates.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::Language;
use crate::lex::{Kind, Token, tokens};

/// A translated file.
#[derive(Debug)]
pub(crate) struct Unit {
    /// C++ for the runner.
    pub(crate) cpp: String,
    /// C++ for OpenCL, for the check of address spaces.
    pub(crate) address_spaces: String,
    /// CUDA, for an NVIDIA GPU.
    pub(crate) cuda: String,
    pub(crate) kernels: Vec<Kernel>,
    /// Function constants by name.
    pub(crate) constants: Vec<String>,
}

/// A kernel and how its parameters are passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
}

/// Where a parameter comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Parameter {
    Buffer(usize),
    Threadgroup(usize),
    Builtin(&'static str),
}

/// Attributes of parameters that are no buffers, with the expression that makes them.
const BUILTINS: [(&str, &str); 12] = [
    ("thread_position_in_threadgroup", "lane->in_group"),
    ("threadgroup_position_in_grid", "lane->group"),
    ("thread_position_in_grid", "lane->in_grid"),
    ("threads_per_threadgroup", "lane->group_size"),
    ("threadgroups_per_grid", "lane->groups"),
    ("threads_per_grid", "lane->grid_size"),
    ("simdgroup_index_in_threadgroup", "{lane->simd, 0, 0}"),
    ("thread_index_in_simdgroup", "{lane->lane, 0, 0}"),
    ("thread_index_in_threadgroup", "{lane->index, 0, 0}"),
    ("simdgroups_per_threadgroup", "{lane->simds, 0, 0}"),
    ("threads_per_simdgroup", "{32, 0, 0}"),
    ("thread_execution_width", "{32, 0, 0}"),
];

const SPACES: [&str; 4] = ["device", "constant", "thread", "threadgroup"];
const SCALARS: [&str; 13] =
    ["void", "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "half", "bfloat"];
/// What clang would take in C++ and Apple's compiler does not, or what means something else there.
const FOREIGN: [&str; 15] = [
    "double",
    "goto",
    "new",
    "delete",
    "throw",
    "try",
    "virtual",
    "dynamic_cast",
    "static_cast",
    "reinterpret_cast",
    "const_cast",
    "std",
    "thread_local",
    "asm",
    "size_t",
];

/// Hides a type, and with it an address space. Tensors of MSL 4 have types that cannot be written out.
const HIDDEN_TYPE: &str = "auto";

/// Translates a file; all lints that it offends, as `line N: what`, if it does.
pub(crate) fn translate(source: &str, language: Language) -> Result<Unit, Vec<String>> {
    let tokens = tokens(source);
    let mut pass = Pass { source, tokens: &tokens, lints: Vec::new(), edits: Vec::new() };
    let (mut kernels, mut constants, mut limits) = (Vec::new(), Vec::new(), Vec::new());
    for (at, token) in tokens.iter().enumerate() {
        match token.text {
            "kernel" => kernels.extend(pass.kernel(at, &mut limits)),
            "threadgroup" => pass.threadgroup_variable(at),
            "function_constant" => constants.extend(pass.function_constant(at)),
            _ => {}
        }
    }
    pass.lint(language);
    let Pass { lints, edits, .. } = pass;
    if !lints.is_empty() {
        return Err(lints);
    }
    let [mut cpp, mut cuda] = [apply(source, &edits, |edit| &edit.cpp), apply(source, &edits, Edit::cuda)];
    for text in [&mut cpp, &mut cuda] {
        text.push_str("\n#undef device\n#undef thread\n#undef threadgroup\n#undef constant\n");
    }
    for kernel in &kernels {
        append_thunk(&mut cpp, kernel);
        // Those that take threadgroup memory from the encoder are left out.
        if kernel.parameters.iter().any(|parameter| matches!(parameter, Parameter::Threadgroup(_))) {
            continue;
        }
        let limit = limits.iter().find(|(name, _)| *name == kernel.name);
        append_cuda_kernel(&mut cuda, kernel, limit.map(|(_, limit)| limit.as_str()));
    }
    cuda.push_str("#pragma clang force_cuda_host_device end\n");
    for (kernel, limit) in &limits {
        let _ = writeln!(
            cpp,
            "extern \"C\" {{ extern const uint32_t msl_limit_{kernel}; const uint32_t msl_limit_{kernel} = {limit}; }}"
        );
    }
    Ok(Unit { cpp, address_spaces: apply(source, &edits, |edit| &edit.address_spaces), cuda, kernels, constants })
}

/// What a kernel is called with.
fn arguments_of(kernel: &Kernel) -> String {
    let arguments: Vec<String> = kernel
        .parameters
        .iter()
        .map(|parameter| match parameter {
            Parameter::Buffer(slot) => format!("msl::Argument{{arguments->buffers[{slot}]}}"),
            Parameter::Threadgroup(slot) => format!("msl::Argument{{arguments->threadgroup[{slot}]}}"),
            Parameter::Builtin(value) => format!("msl_position{{{value}}}"),
        })
        .collect();
    arguments.join(", ")
}

/// The call of a kernel for one lane, and the types of its parameters.
fn append_thunk(cpp: &mut String, kernel: &Kernel) {
    let (name, arguments) = (&kernel.name, arguments_of(kernel));
    // Writing to a String cannot fail.
    let _ = writeln!(
        cpp,
        "extern \"C\" void msl_kernel_{name}(const msl::Arguments* arguments, const msl::Lane* lane) {{ {name}({arguments}); }}\n\
         extern \"C\" void msl_types_{name}(msl::Type* out) {{ msl::types({name}, out); }}"
    );
}

/// The kernel of CUDA that calls a kernel.
fn append_cuda_kernel(cuda: &mut String, kernel: &Kernel, limit: Option<&str>) {
    let (name, arguments) = (&kernel.name, arguments_of(kernel));
    let bounds = limit.map_or(String::new(), |limit| format!("__attribute__((launch_bounds({limit})))"));
    // Writing to a String cannot fail.
    let _ = writeln!(
        cuda,
        "extern \"C\" __global__ void {bounds} msl_kernel_{name}(const msl::Arguments all) {{ const msl::Arguments* arguments = &all; \
         const msl::Lane here = msl::here(); const msl::Lane* lane = &here; (void)lane; {name}({arguments}); }}"
    );
}

/// A stretch of source and what takes its place, without any change of its number of lines.
struct Edit {
    start: usize,
    end: usize,
    cpp: String,
    address_spaces: String,
    /// Where it is not what C++ has.
    cuda: Option<String>,
}

impl Edit {
    fn cuda(&self) -> &str {
        self.cuda.as_deref().unwrap_or(&self.cpp)
    }
}

fn apply(source: &str, edits: &[Edit], text: impl Fn(&Edit) -> &str) -> String {
    let mut edits: Vec<&Edit> = edits.iter().collect();
    edits.sort_by_key(|edit| edit.start);
    let (mut out, mut at) = (String::new(), 0);
    for edit in edits {
        out.push_str(&source[at..edit.start]);
        out.push_str(text(edit));
        let lines = source[edit.start..edit.end].matches('\n').count() - text(edit).matches('\n').count();
        out.extend(std::iter::repeat_n('\n', lines));
        at = edit.end;
    }
    out.push_str(&source[at..]);
    out
}

struct Pass<'a> {
    source: &'a str,
    tokens: &'a [Token<'a>],
    lints: Vec<String>,
    edits: Vec<Edit>,
}

impl<'a> Pass<'a> {
    fn text(&self, at: usize) -> &'a str {
        self.tokens.get(at).filter(|token| token.kind != Kind::Text).map_or("", |token| token.text)
    }

    fn lint_at(&mut self, at: usize, what: impl std::fmt::Display) {
        self.lints.push(format!("line {}: {what}", self.tokens[at].line));
    }

    fn replace(&mut self, first: usize, last: usize, cpp: String, address_spaces: String) {
        let (start, end) = (self.tokens[first].start, self.tokens[last].end());
        self.edits.push(Edit { start, end, cpp, address_spaces, cuda: None });
    }

    fn replace_with_cuda(&mut self, first: usize, last: usize, cpp: String, address_spaces: String, cuda: String) {
        self.replace(first, last, cpp, address_spaces);
        if let Some(edit) = self.edits.last_mut() {
            edit.cuda = Some(cuda);
        }
    }

    /// The token that closes what `open` opens.
    fn closing(&self, open: usize) -> Option<usize> {
        let mut depth = 0;
        for at in open..self.tokens.len() {
            match self.text(at) {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Some(at);
            }
        }
        None
    }

    /// `kernel void NAME(PARAMETERS)`, with `[[max_total_threads_per_threadgroup(N)]]` before or after `kernel`.
    fn kernel(&mut self, at: usize, limits: &mut Vec<(String, String)>) -> Option<Kernel> {
        const LIMIT: &str = "max_total_threads_per_threadgroup";
        let mut next = at + 1;
        let mut limit = None;
        if self.text(next) == "[" && self.text(next + 2) == LIMIT {
            let close = self.closing(next)?;
            limit = Some((next, close));
            next = close + 1;
        } else if at >= 2 && self.text(at - 1) == "]" && self.text(at - 2) == "]" {
            let open = (0..at).rev().find(|open| self.text(*open) == "[" && self.text(open + 1) == "[")?;
            limit = (self.text(open + 2) == LIMIT).then_some((open, at - 1));
        }
        if self.text(next) != "void" || self.text(next + 2) != "(" {
            self.lint_at(at, "a kernel is written `kernel void NAME(PARAMETERS)`");
            return None;
        }
        let name = self.text(next + 1).to_owned();
        self.replace_with_cuda(at, at, String::new(), String::new(), "static __device__ inline".into());
        if let Some((open, close)) = limit {
            let (first, last) = (self.tokens[open + 4].start, self.tokens[close - 3].end());
            limits.push((name.clone(), self.source[first..last].to_owned()));
            self.replace(open, close, String::new(), String::new());
        }
        let open = next + 2;
        let close = self.closing(open)?;
        let mut parameters = Vec::new();
        let mut first = open + 1;
        for at in open + 1..=close {
            let depth_is_zero = at == close || (self.text(at) == "," && self.depth(open + 1, at) == 0);
            if depth_is_zero {
                parameters.extend(self.parameter(&name, first, at));
                first = at + 1;
            }
        }
        let mut slots = BTreeSet::new();
        for parameter in &parameters {
            if let Parameter::Buffer(slot) = parameter
                && !slots.insert(*slot)
            {
                self.lint_at(at, format_args!("{name} has two buffers at slot {slot}"));
            }
        }
        Some(Kernel { name, parameters })
    }

    /// Brackets of all kinds that are open at `at`, from `first` on.
    fn depth(&self, first: usize, at: usize) -> i32 {
        (first..at).fold(0, |depth, at| match self.text(at) {
            "(" | "[" | "{" | "<" => depth + 1,
            ")" | "]" | "}" | ">" => depth - 1,
            _ => depth,
        })
    }

    /// One parameter in tokens `first..end`; its attribute is taken out of the text.
    fn parameter(&mut self, kernel: &str, first: usize, end: usize) -> Option<Parameter> {
        let declared = || self.source[self.tokens[first].start..self.tokens[end - 1].end()].to_owned();
        let Some(open) = (first..end).find(|at| self.text(*at) == "[" && self.text(at + 1) == "[") else {
            let what = format!("{kernel}: parameter `{}` has no attribute", declared());
            self.lint_at(first, what);
            return None;
        };
        let close = self.closing(open)?;
        let (attribute, number) = (self.text(open + 2), self.text(open + 4).parse());
        let builtin = BUILTINS.iter().find(|(name, _)| *name == attribute);
        let parameter = match (attribute, number, builtin) {
            ("buffer", Ok(slot @ 0..31), _) => Parameter::Buffer(slot),
            ("threadgroup", Ok(slot @ 0..8), _) => Parameter::Threadgroup(slot),
            (_, _, Some((_, value))) => Parameter::Builtin(value),
            _ => {
                let what = format!("{kernel}: parameter `{}` has an attribute that is not known", declared());
                self.lint_at(first, what);
                return None;
            }
        };
        self.replace(open, close, String::new(), String::new());
        Some(parameter)
    }

    /// `threadgroup TYPE NAME[..];` in a body.
    fn threadgroup_variable(&mut self, at: usize) {
        if at == 0 || !matches!(self.text(at - 1), ";" | "{" | "}") {
            return;
        }
        let ends = |end: &usize| {
            matches!(self.text(*end), ";" | "=" | "(" | "*" | "&")
                && (self.text(*end) == ";" || self.depth(at, *end) == 0)
        };
        let Some(end) = (at..self.tokens.len()).find(ends) else { return };
        if self.text(end) != ";" {
            return;
        }
        let name_at = (at..end).find(|at| self.text(*at) == "[").unwrap_or(end) - 1;
        let name = self.text(name_at);
        let of = |from: usize, to: usize| &self.source[self.tokens[from].start..self.tokens[to].end()];
        let declared = of(at + 1, end - 1);
        let bounds = if name_at + 1 == end { "" } else { of(name_at + 1, end - 1) };
        let kind = of(at + 1, name_at - 1);
        let cpp = format!("static {declared}; msl::threadgroup_variable(&{name}, sizeof {name});");
        // OpenCL has such variables in kernels only; a reference from nowhere has the same type.
        // Behind the name of a vector a bracket would begin the macro that makes one.
        let kind = format!("metal::msl_same<{kind}>::type");
        let address_spaces = format!("threadgroup {kind} (&{name}){bounds} = *(threadgroup {kind} (*){bounds})0;");
        self.replace_with_cuda(at, end, cpp, address_spaces, format!("__shared__ {declared};"));
    }

    /// `constant uint NAME [[function_constant(N)]];`
    fn function_constant(&mut self, at: usize) -> Option<String> {
        let first = at.checked_sub(5)?;
        let shape = [self.text(first), self.text(first + 1), self.text(at + 4), self.text(at + 6)];
        if shape != ["constant", "uint", "]", ";"] {
            self.lint_at(at, "a function constant is written `constant uint NAME [[function_constant(N)]];`");
            return None;
        }
        let name = self.text(first + 2).to_owned();
        let cpp = format!("extern \"C\" {{ extern uint {name}; uint {name}; }}");
        let cuda = format!("extern \"C\" {{ __constant__ uint {name}; }}");
        self.replace_with_cuda(first, at + 6, cpp, format!("constant uint {name} = 1;"), cuda);
        Some(name)
    }

    fn lint(&mut self, language: Language) {
        let types = self.type_names();
        let is_type = |text: &str| types.contains(text);
        for at in 0..self.tokens.len() {
            let token = self.tokens[at];
            match token.kind {
                Kind::Directive => {
                    let made = ["kernel", "threadgroup", "function_constant"];
                    if token.text.starts_with("#define") && made.iter().any(|word| token.text.contains(word)) {
                        self.lint_at(
                            at,
                            "kernels, threadgroup variables and function constants are not made by macros",
                        );
                    }
                }
                Kind::Word
                    if FOREIGN.contains(&token.text)
                        || (token.text == HIDDEN_TYPE && language == Language::Metal3_2) =>
                {
                    self.lint_at(at, format_args!("`{}` is not written in kernels", token.text));
                }
                Kind::Punct if token.is("*") || token.is("&") => self.lint_address(at, &is_type),
                Kind::Punct if token.is("(") => {
                    let vector = self.text(at + 1);
                    let operand = self.tokens.get(at + 3);
                    let casts = operand.is_some_and(|t| matches!(t.kind, Kind::Word | Kind::Number) || t.is("("));
                    if is_vector(vector) && self.text(at + 2) == ")" && casts {
                        let what = "is a cast of C++, which keeps bits where MSL converts: write";
                        self.lint_at(at, format_args!("`({vector})` {what} `{vector}(..)`"));
                    }
                }
                Kind::Punct if token.is("[") && matches!(self.text(at + 1), "&" | "=") => {
                    self.lint_at(at, "MSL has no lambdas");
                }
                _ => {}
            }
        }
    }

    /// A `*` or `&` that declares a pointer or reference says in which address space.
    fn lint_address(&mut self, at: usize, is_type: &impl Fn(&str) -> bool) {
        let Some(mut before) = at.checked_sub(1) else { return };
        // `TYPE (&name)[..]`
        if self.text(before) == "("
            && self.tokens.get(at + 1).is_some_and(|next| next.kind == Kind::Word || next.is(")"))
        {
            match before.checked_sub(1) {
                Some(outer) if is_type(self.text(outer)) => before = outer,
                _ => return,
            }
        }
        if matches!(self.text(before), ">") {
            let Some(open) = (0..before).rev().find(|open| self.text(*open) == "<") else { return };
            if open == 0 || !is_type(self.text(open - 1)) {
                return;
            }
            before = open - 1;
        }
        if !is_type(self.text(before)) && self.text(before) != "const" {
            return;
        }
        let start =
            (0..before).rev().find(|at| matches!(self.text(*at), ";" | "{" | "}" | "(" | ")" | "," | "<" | "="));
        let start = start.map_or(0, |start| start + 1);
        if !(start..=before).any(|at| SPACES.contains(&self.text(at))) {
            let what =
                format!("`{}` has no address space", &self.source[self.tokens[start].start..self.tokens[at].end()]);
            self.lint_at(at, what);
        }
    }

    /// Names of types: built in, or declared in the file.
    fn type_names(&self) -> BTreeSet<String> {
        let mut names: BTreeSet<String> = SCALARS.iter().map(|name| name.to_string()).collect();
        for scalar in SCALARS {
            names.extend((2..=4).map(|n| format!("{scalar}{n}")));
        }
        names.extend(
            ["atomic_uint", "atomic_int", "simdgroup_matrix", "simdgroup_float8x8", "simdgroup_half8x8", HIDDEN_TYPE]
                .map(str::to_owned),
        );
        for at in 1..self.tokens.len() {
            match self.text(at - 1) {
                "struct" | "typename" | "class" => {
                    names.insert(self.text(at).to_owned());
                }
                "typedef" => {
                    let end = (at..self.tokens.len()).find(|end| self.text(*end) == ";");
                    names.extend(end.map(|end| self.text(end - 1).to_owned()));
                }
                "using" if self.text(at + 1) == "=" => {
                    names.insert(self.text(at).to_owned());
                }
                _ => {}
            }
        }
        names
    }
}

fn is_vector(name: &str) -> bool {
    name.strip_suffix(['2', '3', '4']).is_some_and(|scalar| SCALARS.contains(&scalar))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lints(source: &str) -> Vec<String> {
        translate(source, Language::Metal3_2).err().unwrap_or_default()
    }

    #[test]
    fn a_kernel_is_found_with_its_slots_and_constants() {
        let unit = translate(
            "constant uint N [[function_constant(0)]];\n\
             [[max_total_threads_per_threadgroup(128)]] kernel void f(\n\
             device const float* x [[buffer(0)]], constant float4& y [[buffer(7)]],\n\
             threadgroup float* z [[threadgroup(1)]], uint lane [[thread_index_in_simdgroup]]) {\n\
             threadgroup float s[4][N];\n}\n",
            Language::Metal3_2,
        )
        .expect("no lint");
        assert_eq!(unit.constants, ["N"]);
        let parameters = vec![
            Parameter::Buffer(0),
            Parameter::Buffer(7),
            Parameter::Threadgroup(1),
            Parameter::Builtin("{lane->lane, 0, 0}"),
        ];
        assert_eq!(unit.kernels, [Kernel { name: "f".into(), parameters }]);
        assert!(unit.cpp.contains("static float s[4][N]; msl::threadgroup_variable(&s, sizeof s);"), "{}", unit.cpp);
        assert!(unit.cpp.contains("const uint32_t msl_limit_f = 128;"), "{}", unit.cpp);
        assert!(
            unit.address_spaces.contains("threadgroup metal::msl_same<float>::type (&s)[4][N]"),
            "{}",
            unit.address_spaces
        );
    }

    #[test]
    fn a_pointer_or_reference_without_an_address_space_is_named() {
        for bad in [
            "void f(float* x) {}",
            "void f(device float* x) { float* y = x; }",
            "void f(float (&x)[4]) {}",
            "struct S { uint a; }; void f(const S& s) {}",
            "template <typename T> void f(T* x) {}",
            "void f(simdgroup_matrix<float, 8, 8>& m) {}",
            "kernel void k(float* x [[buffer(0)]]) {}",
            "void f(device uint* x) { device float* y = (float*)(x); }",
        ] {
            let lints = lints(bad);
            assert!(lints.len() == 1 && lints[0].contains("no address space"), "{bad}: {lints:?}");
        }
        for good in [
            "void f(device const float4* x, thread float (&y)[8], thread simdgroup_matrix<float, 8, 8>& m) {}",
            "void f(uint a, uint b) { uint c = a * b + (a & b) + sizeof(float) * (a & 3); }",
            "void f(device uint* x) { device float* y = (device float*)(x + 1); *y = 2 * *y; bool z = x && y; }",
        ] {
            assert_eq!(lints(good), Vec::<String>::new(), "{good}");
        }
    }

    #[test]
    fn what_means_something_else_in_cpp_is_named() {
        for (bad, what) in [
            ("void f(uint2 x) { float2 y = (float2)x; }", "`(float2)` is a cast of C++"),
            ("void f() { double x = 1; }", "`double`"),
            ("void f(uint2 x) { float2 y = static_cast<float2>(x); }", "`static_cast`"),
            ("void f() { uint x = 1; uint y = [&] { return x; }(); }", "no lambdas"),
            ("#define K(n) kernel void n() {}", "not made by macros"),
            ("kernel void k(device float* x) {}", "has no attribute"),
            ("kernel void k(device float* x [[buffer(31)]]) {}", "not known"),
            ("kernel void k(uint x [[amplification_id]]) {}", "not known"),
            ("kernel void k(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) {}", "two buffers at slot 1"),
            ("constant bool X [[function_constant(0)]];", "is written `constant uint"),
            ("template <uint N> kernel uint k() {}", "is written `kernel void"),
        ] {
            let lints = lints(bad);
            assert!(lints.len() == 1 && lints[0].contains(what), "{bad}: {lints:?}");
        }
    }

    #[test]
    fn types_are_hidden_only_where_they_cannot_be_written_out() {
        let lints = |source, language| translate(source, language).err().unwrap_or_default();
        let tile = "void f() { auto tile = product(); }";
        assert_eq!(lints(tile, Language::Metal3_2), ["line 1: `auto` is not written in kernels"]);
        assert_eq!(lints(tile, Language::Metal4_0), Vec::<String>::new());
        let pointer = "void f(device float* x) { auto* y = x; }";
        assert_eq!(lints(pointer, Language::Metal4_0), ["line 1: `auto*` has no address space"]);
    }

    #[test]
    fn lints_count_lines_as_the_file_does() {
        assert_eq!(
            lints("a b;\n#line 1 \"k.metal\"\n\nvoid f(float* x) {}\n"),
            ["line 2: `float*` has no address space"]
        );
    }
}
