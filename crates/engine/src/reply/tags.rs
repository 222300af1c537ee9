//! The tags of an output, looked for in text of which more may come.
//!
//! Every answer given here holds whatever comes next: as long as more text could change it, it is [`Miss::Later`].

const CALL_OPEN: &str = "<tool_call>";
const CALL_CLOSE: &str = "</tool_call>";
const FUNCTION_OPEN: &str = "<function=";
const FUNCTION_CLOSE: &str = "</function>";
const PARAMETER_OPEN: &str = "<parameter=";
const PARAMETER_CLOSE: &str = "</parameter>";

/// Why something does not stand where it was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Miss {
    /// It does not.
    Never,
    /// It may, with more text.
    Later,
}

pub(super) type Match<T> = Result<T, Miss>;

/// The first of the alternatives that stands there.
pub(super) fn first<T>(alternatives: impl IntoIterator<Item = Match<T>>) -> Match<T> {
    let mut miss = Miss::Never;
    for alternative in alternatives {
        match alternative {
            Err(Miss::Never) => (),
            Err(Miss::Later) => miss = Miss::Later,
            found => return found,
        }
    }
    Err(miss)
}

/// The text from one place on.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    pub(super) text: &'a str,
    /// Nothing comes behind it.
    pub(super) over: bool,
}

/// What stands between the parameters of a call.
pub(super) enum Next<'a> {
    /// The opening tag of a parameter with this name.
    Parameter(&'a str),
    FunctionClosed,
    CallClosed,
    CallOpened,
    /// The output is over, perhaps in the middle of one of these tags.
    Over,
}

impl<'a> Ahead<'a> {
    fn from(self, at: usize) -> Ahead<'a> {
        Ahead { text: &self.text[at..], ..self }
    }

    /// Behind the white space.
    pub(super) fn behind_space(self) -> Ahead<'a> {
        Ahead { text: self.text.trim_start(), ..self }
    }

    /// Behind `tag`.
    pub(super) fn tag(self, tag: &str) -> Match<Ahead<'a>> {
        match self.text.strip_prefix(tag) {
            Some(text) => Ok(Ahead { text, ..self }),
            None if !self.over && tag.starts_with(self.text) => Err(Miss::Later),
            None => Err(Miss::Never),
        }
    }

    /// Whether the output ends here, or within `tag`.
    fn cut(self, tag: &str) -> Match<()> {
        if self.over && tag.starts_with(self.text) && tag != self.text { Ok(()) } else { Err(Miss::Never) }
    }

    /// The name that `open` and `>` enclose, which is part of one line, and what is behind.
    fn named(self, open: &str) -> Match<(&'a str, Ahead<'a>)> {
        let name = self.tag(open)?;
        match name.text.find(['>', '\n']) {
            Some(end) if name.text[end..].starts_with('>') => Ok((&name.text[..end], name.from(end + 1))),
            None if !self.over => Err(Miss::Later),
            _ => Err(Miss::Never),
        }
    }

    /// The name of the function that a call opens with, and what is behind. `bare`: which names may go without
    /// `<tool_call>`, if any. The call must go on as one, or this is only text about calls.
    pub(super) fn call(self, bare: Option<impl Fn(&str) -> bool>) -> Match<(&'a str, Ahead<'a>)> {
        let tagged = self.tag(CALL_OPEN).and_then(|at| at.behind_space().named(FUNCTION_OPEN));
        let bare = bare.ok_or(Miss::Never).and_then(|may| {
            let (name, behind) = self.named(FUNCTION_OPEN)?;
            if may(name) { Ok((name, behind)) } else { Err(Miss::Never) }
        });
        let (name, behind) = first([tagged, bare])?;
        if name.is_empty() {
            return Err(Miss::Never);
        }
        behind.next()?;
        Ok((name, behind))
    }

    /// What a call goes on with, behind white space, and what is behind that.
    pub(super) fn next(self) -> Match<(Next<'a>, Ahead<'a>)> {
        let at = self.behind_space();
        let within_a_name = at.over && at.text.starts_with(PARAMETER_OPEN) && !at.text.contains(['>', '\n']);
        let tags = [PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN];
        if within_a_name || tags.iter().any(|tag| at.cut(tag).is_ok()) {
            return Ok((Next::Over, at.from(at.text.len())));
        }
        first([
            at.named(PARAMETER_OPEN).map(|(key, behind)| (Next::Parameter(key), behind)),
            at.tag(FUNCTION_CLOSE).map(|behind| (Next::FunctionClosed, behind)),
            at.tag(CALL_CLOSE).map(|behind| (Next::CallClosed, behind)),
            at.tag(CALL_OPEN).map(|behind| (Next::CallOpened, behind)),
        ])
    }

    /// Behind a closing tag that belongs to a call which is over, and behind the white space before it.
    pub(super) fn closed_again(self) -> Match<Ahead<'a>> {
        let at = self.behind_space();
        first([at.cut(CALL_CLOSE).map(|()| at.from(at.text.len())), at.tag(CALL_CLOSE)])
    }

    /// Where the call of a value that ends here goes on. `starts_line`: a line break is before this place; `in_line`:
    /// none is behind the opening tag of the value.
    pub(super) fn value_end(self, starts_line: bool, in_line: bool) -> Match<Ahead<'a>> {
        let parameter = self.tag(PARAMETER_CLOSE).and_then(|behind| {
            let next = behind.behind_space();
            let space = &behind.text[..behind.text.len() - next.text.len()];
            if starts_line || in_line || space.contains('\n') {
                behind.next()?;
            } else if !next.text.is_empty() {
                return Err(Miss::Never);
            } else if !self.over {
                return Err(Miss::Later);
            }
            Ok(behind)
        });
        if !starts_line {
            return parameter;
        }
        let function = self.tag(FUNCTION_CLOSE).and_then(|behind| {
            let call = behind.behind_space();
            first([call.cut(CALL_CLOSE), call.tag(CALL_CLOSE).and_then(Ahead::call_is_over), behind.call_is_over()])
        });
        let call = self.tag(CALL_CLOSE).and_then(Ahead::call_is_over);
        first([parameter, function.map(|()| self), call.map(|()| self)])
    }

    /// Whether nothing but another call follows.
    fn call_is_over(self) -> Match<()> {
        let at = self.behind_space();
        first([at.cut(CALL_OPEN), at.tag(CALL_OPEN).map(|_| ())])
    }
}
