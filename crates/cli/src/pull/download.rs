//! One file from the hub to the disk: requests, retries, resuming, and the hash of what arrived.
//!
//! Plain `reqwest` and not the `hf-hub` crate: hf-hub brings the client of a second storage protocol, checks no hashes of
//! ours and keeps its own cache layout, while all that is needed here is GET with a `Range`.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Error, Result, anyhow, bail};
use indicatif::DecimalBytes;
use reqwest::StatusCode;
use reqwest::blocking::{Client, Response};
use reqwest::header::{CONTENT_RANGE, CONTENT_TYPE, HeaderMap, RANGE, RETRY_AFTER};
use sha2::{Digest, Sha256};

use super::disk_error;
use super::manifest::{Entry, REPO, REVISION};
use super::progress::FileProgress;

/// Bytes read at once, from the network or the disk; larger ones gain nothing.
const BUFFER_BYTES: usize = 1 << 20;

/// A connection that brought this much counts as a working one: the retries start from zero after it.
const USEFUL_BYTES: u64 = 1 << 20;

/// The longest pause that a server may ask for between two attempts; one that wants more ends the download.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);

/// What to do about a server that has something else.
const ADVICE: &str = "it does not serve the pinned revision of this checkpoint; check --endpoint or HF_ENDPOINT";

/// How the hub is reached.
pub struct Hub {
    client: Client,
    endpoint: String,
    token: Option<String>,
    retries: u32,
    /// Set by whoever owns the downloads, to end them all after the first error.
    pub stop: AtomicBool,
}

/// Why one request did not bring the rest of a file.
enum Fault {
    /// Worth another attempt, after `pause` if the server named one.
    Transient { cause: Error, pause: Option<Duration> },
    /// The same again would fail again.
    Fatal(Error),
}

impl Fault {
    fn transient(cause: Error) -> Self {
        Self::Transient { cause, pause: None }
    }
}

impl Hub {
    /// `timeout`: how long a connection may be silent. Proxies are taken from the environment by `reqwest`.
    ///
    /// # Errors
    /// An endpoint that is no http address, or a system without TLS root certificates.
    pub fn new(endpoint: &str, token: Option<&str>, retries: u32, timeout: Duration) -> Result<Self> {
        let endpoint = endpoint.trim().trim_end_matches('/');
        if !reqwest::Url::parse(endpoint).is_ok_and(|url| matches!(url.scheme(), "http" | "https")) {
            bail!("--endpoint or HF_ENDPOINT: found `{endpoint}`, expected an address such as {}", super::PUBLIC_HUB);
        }
        let token = token.map(str::trim).filter(|token| !token.is_empty());
        if token.is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            bail!("--token or HF_TOKEN: found blanks or control characters, expected one word");
        }
        // ring, because it builds with no more than a C compiler. An installed provider is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // HTTP/1.1 (no `http2` feature): one connection per file, each with its own window, is faster than one for all.
        let client = Client::builder()
            .user_agent(concat!("lily/", env!("CARGO_PKG_VERSION")))
            .timeout(timeout)
            .build()
            .context("cannot set up TLS: install the system's root certificates, or name them in SSL_CERT_FILE")?;
        let (endpoint, token) = (endpoint.to_owned(), token.map(str::to_owned));
        Ok(Self { client, endpoint, token, retries, stop: AtomicBool::new(false) })
    }

    /// Brings the file of `entry` to `path` by way of `path.part`, which is continued if it is there.
    ///
    /// # Errors
    /// After which `path.part` holds what arrived, unless it was proved wrong.
    pub fn download(&self, entry: &Entry, path: &Path, progress: &FileProgress<'_>) -> Result<()> {
        let part_path = part_path(path);
        let name = &entry.name;
        let mut was_wrong = false;
        loop {
            let mut part = Part::open(&part_path, entry.size_bytes, progress)?;
            self.fill(entry, &mut part, progress)?;
            let found = part.finish()?;
            if found == entry.sha256 {
                return fs::rename(&part_path, path).map_err(|error| disk_error(path, error));
            }
            fs::remove_file(&part_path).map_err(|error| disk_error(&part_path, error))?;
            progress.restart();
            if was_wrong {
                bail!(
                    "{name}: wrong bytes twice (SHA-256 {found}, published {}): {} or a proxy on the way alters the file; \
                     try another network or --endpoint",
                    entry.sha256,
                    self.endpoint
                );
            }
            progress.note(&format!("{name}: wrong bytes (SHA-256 {found}), deleted; downloading it once more"));
            was_wrong = true;
        }
    }

    /// Requests what `part` lacks until it is full or the retries are used up.
    fn fill(&self, entry: &Entry, part: &mut Part, progress: &FileProgress<'_>) -> Result<()> {
        let mut failures = 0;
        while part.len < entry.size_bytes {
            let before = part.len;
            let (cause, pause) = match self.transfer(entry, part, progress) {
                Ok(()) => break,
                Err(Fault::Fatal(error)) => return Err(error.context(entry.name.clone())),
                Err(Fault::Transient { cause, pause }) => (cause, pause),
            };
            if part.len - before >= USEFUL_BYTES {
                failures = 0;
            }
            if failures == self.retries {
                let advice = format!("{}: gave up after {failures} retries; `lily pull` again resumes", entry.name);
                return Err(cause.context(advice));
            }
            let pause = pause.unwrap_or(Duration::from_secs(1 << failures.min(5)));
            failures += 1;
            let seconds = pause.as_secs();
            progress.note(&format!("{}: {cause:#}; retry {failures} of {} in {seconds} s", entry.name, self.retries));
            self.sleep(pause)?;
        }
        Ok(())
    }

    /// One request: appends to `part` what the server sends of the missing bytes.
    fn transfer(&self, entry: &Entry, part: &mut Part, progress: &FileProgress<'_>) -> Result<(), Fault> {
        let url = format!("{}/{REPO}/resolve/{REVISION}/{}", self.endpoint, entry.name);
        let mut request = self.client.get(url);
        if let Some(token) = &self.token {
            // reqwest drops it when a redirect leads to another host.
            request = request.bearer_auth(token);
        }
        if part.len > 0 {
            request = request.header(RANGE, format!("bytes={}-", part.len));
        }
        let mut response = request.send().map_err(|error| self.no_answer(error))?;
        self.check_status(&response)?;
        let first = first_byte(&response, entry.size_bytes).map_err(Fault::Fatal)?;
        // A server that knows no ranges begins at zero: what is there already is read past, not written again.
        let Some(mut known) = part.len.checked_sub(first) else {
            return Err(Fault::Fatal(anyhow!(
                "asked for the bytes from {}, the server sent those from {first}",
                part.len
            )));
        };
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Fault::Fatal(anyhow!("stopped")));
            }
            let count = match response.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) => {
                    return Err(Fault::transient(Error::from(error).context(part.broken_off(entry))));
                }
            };
            let skipped = known.min(count as u64);
            known -= skipped;
            let fresh = &buffer[skipped as usize..count];
            if part.len + fresh.len() as u64 > entry.size_bytes {
                return Err(Fault::Fatal(anyhow!(
                    "the server sends more than the {} bytes of the published file; {ADVICE}",
                    entry.size_bytes
                )));
            }
            part.append(fresh).map_err(Fault::Fatal)?;
            progress.add(fresh.len() as u64);
        }
        if part.len < entry.size_bytes {
            return Err(Fault::transient(anyhow!(part.broken_off(entry))));
        }
        Ok(())
    }

    fn no_answer(&self, error: reqwest::Error) -> Fault {
        let hopeless = error.is_builder() || error.is_redirect();
        // The address may be a signed one after a redirect: not for a terminal.
        let cause = Error::from(error.without_url()).context(format!(
            "no answer from {} (is the network up? is a proxy needed, in HTTPS_PROXY?)",
            self.endpoint
        ));
        if hopeless { Fault::Fatal(cause) } else { Fault::transient(cause) }
    }

    fn check_status(&self, response: &Response) -> Result<(), Fault> {
        let status = response.status();
        let advice = match status {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => return Ok(()),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if self.token.is_some() => {
                "the token of --token or HF_TOKEN is wrong, expired or without the right to read this repository"
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                "a private mirror needs --token or HF_TOKEN; otherwise check --endpoint or HF_ENDPOINT"
            }
            StatusCode::NOT_FOUND | StatusCode::GONE => ADVICE,
            StatusCode::RANGE_NOT_SATISFIABLE => {
                "its file is shorter than the published one; check --endpoint or HF_ENDPOINT"
            }
            StatusCode::PROXY_AUTHENTICATION_REQUIRED => "the proxy wants a name and password, in HTTPS_PROXY",
            _ => "check --endpoint or HF_ENDPOINT, or try later",
        };
        if status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT) {
            let pause = retry_after(response.headers());
            if let Some(long) = pause.filter(|pause| *pause > LONGEST_PAUSE) {
                let seconds = long.as_secs();
                let cause = anyhow!("{} answered {status}: `lily pull` again in {seconds} s resumes", self.endpoint);
                return Err(Fault::Fatal(cause));
            }
            return Err(Fault::Transient { cause: anyhow!("{} answered {status}", self.endpoint), pause });
        }
        Err(Fault::Fatal(anyhow!("{} answered {status}: {advice}", self.endpoint)))
    }

    /// Sleeps, but not on when another file has failed.
    fn sleep(&self, pause: Duration) -> Result<()> {
        let end = Instant::now() + pause;
        while Instant::now() < end {
            if self.stop.load(Ordering::Relaxed) {
                bail!("stopped");
            }
            thread::sleep(Duration::from_millis(50).min(pause));
        }
        Ok(())
    }
}

/// Where the body of `response` begins in the file. Refuses answers that cannot be the file of `size_bytes`.
fn first_byte(response: &Response, size_bytes: u64) -> Result<u64> {
    let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    if header(CONTENT_TYPE).starts_with("text/html") {
        bail!("the server answered with a web page, not the file: a log-in page or a proxy in between? {ADVICE}");
    }
    let (first, size) = if response.status() == StatusCode::PARTIAL_CONTENT {
        let range = header(CONTENT_RANGE);
        content_range(range)
            .with_context(|| format!("Content-Range: found `{range}`, expected `bytes FIRST-LAST/SIZE`"))?
    } else {
        (0, response.content_length())
    };
    match size {
        Some(size) if size != size_bytes => {
            bail!("the server's file has {size} bytes, the published one {size_bytes}: {ADVICE}")
        }
        _ => Ok(first),
    }
}

/// First byte and size of the file from `bytes FIRST-LAST/SIZE`; the size may be `*`.
fn content_range(value: &str) -> Option<(u64, Option<u64>)> {
    let (range, size) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (first, _) = range.split_once('-')?;
    let size = if size == "*" { None } else { Some(size.parse().ok()?) };
    Some((first.parse().ok()?, size))
}

/// Seconds or a date (RFC 9110, 10.2.3).
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?;
    match value.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(value).ok()?.duration_since(SystemTime::now()).ok(),
    }
}

/// The unfinished file or directory beside `path`.
pub fn part_path(path: &Path) -> PathBuf {
    path.with_added_extension("part")
}

/// The unfinished file: only ever appended to, so that its length says what is missing, whenever the process ends.
struct Part {
    path: PathBuf,
    file: File,
    len: u64,
    hasher: Sha256,
}

impl Part {
    /// Opens and hashes what is there of `size_bytes`; a part that is longer than its file is deleted.
    fn open(path: &Path, size_bytes: u64, progress: &FileProgress<'_>) -> Result<Self> {
        if fs::metadata(path).is_ok_and(|metadata| metadata.len() > size_bytes) {
            fs::remove_file(path).map_err(|error| disk_error(path, error))?;
        }
        let open = || {
            let file = File::options().read(true).append(true).create(true).open(path)?;
            let len = file.metadata()?.len();
            let hasher = hash(&file, len, progress)?;
            Ok(Self { path: path.to_owned(), file, len, hasher })
        };
        open().map_err(|error| disk_error(path, error))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| disk_error(&self.path, error))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Everything on the disk; the hash of it in hex.
    fn finish(self) -> Result<String> {
        self.file.sync_all().map_err(|error| disk_error(&self.path, error))?;
        Ok(hex(self.hasher))
    }

    fn broken_off(&self, entry: &Entry) -> String {
        format!("the connection ended at {} of {}", DecimalBytes(self.len), DecimalBytes(entry.size_bytes))
    }
}

/// The SHA-256 of the whole file at `path`, in hex.
pub fn hash_file(path: &Path, progress: &FileProgress<'_>) -> Result<String> {
    let hash = || {
        let file = File::open(path)?;
        hash(&file, file.metadata()?.len(), progress)
    };
    hash().map(hex).map_err(|error| disk_error(path, error))
}

fn hash(file: &File, len: u64, progress: &FileProgress<'_>) -> io::Result<Sha256> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut rest = file.take(len);
    loop {
        let count = rest.read(&mut buffer)?;
        if count == 0 {
            return Ok(hasher);
        }
        hasher.update(&buffer[..count]);
        progress.add(count as u64);
    }
}

fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_range_is_read_or_refused() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(content_range("bytes 0-0/*"), Some((0, None)));
        for wrong in ["", "bytes", "bytes 5-9", "bytes */10", "bytes -5/10", "items 5-9/10", "bytes 5-9/ten"] {
            assert_eq!(content_range(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let pause = |value: String| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]);
            retry_after(&headers).map(|pause| pause.as_secs())
        };
        assert_eq!(pause("7".into()), Some(7));
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(60));
        // A date has whole seconds, and the clock goes on.
        assert!((55..=60).contains(&pause(date).unwrap()));
        assert_eq!(pause("Sun, 06 Nov 1994 08:49:37 GMT".into()), None);
        assert_eq!(pause("soon".into()), None);
        assert_eq!(retry_after(&HeaderMap::new()), None);
    }
}
