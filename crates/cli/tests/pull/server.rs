//! An HTTP server on 127.0.0.1 that counts what it sends and can misbehave.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request as it arrived, and how many body bytes went into the reply.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub target: String,
    pub headers: HashMap<String, String>,
    pub sent_bytes: usize,
}

impl Request {
    pub fn file(&self) -> &str {
        self.target.rsplit('/').next().unwrap()
    }

    pub fn range_start(&self) -> Option<usize> {
        let range = self.headers.get("range")?.strip_prefix("bytes=")?;
        Some(range.strip_suffix('-').unwrap().parse().unwrap())
    }
}

/// What goes back: the body may be shorter than its declared length, slow, or followed by silence.
pub struct Reply {
    pub status: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    pub pause_per_16_kib: Duration,
    pub silence: Duration,
}

impl Reply {
    pub fn status(status: &'static str) -> Self {
        let (headers, body) = (vec![("Content-Length", "3".into())], b"no\n".to_vec());
        Self { status, headers, body, pause_per_16_kib: Duration::ZERO, silence: Duration::ZERO }
    }

    pub fn whole(body: &[u8]) -> Self {
        let headers = vec![("Content-Length", body.len().to_string())];
        Self { headers, body: body.to_vec(), ..Self::status("200 OK") }
    }

    /// What an honest server answers.
    pub fn honest(request: &Request, body: &[u8]) -> Self {
        let Some(first) = request.range_start() else {
            return Self::whole(body);
        };
        let range = format!("bytes {first}-{}/{}", body.len() - 1, body.len());
        Self { status: "206 Partial Content", ..Self::whole(&body[first..]) }.with("Content-Range", range)
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub fn without_length(mut self) -> Self {
        self.headers.retain(|(name, _)| *name != "Content-Length");
        self
    }

    /// Declares the whole body, sends `len` bytes of it and closes.
    pub fn cut_to(mut self, len: usize) -> Self {
        self.body.truncate(len);
        self
    }
}

/// Answers on 127.0.0.1 until the test ends.
pub struct Server {
    pub endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// `behave` gets the request and how many came before for the same file.
    pub fn start(behave: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (log, behave) = (requests.clone(), Arc::new(behave));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (log, behave) = (log.clone(), behave.clone());
                thread::spawn(move || answer(stream.unwrap(), &log, &*behave));
            }
        });
        Self { endpoint, requests }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    pub fn requests_of(&self, file: &str) -> Vec<Request> {
        self.requests().into_iter().filter(|request| request.file() == file).collect()
    }

    pub fn sent_bytes(&self) -> usize {
        self.requests().iter().map(|request| request.sent_bytes).sum()
    }
}

/// One request per connection, so that closing is always an end that the client sees.
fn answer(stream: TcpStream, log: &Mutex<Vec<Request>>, behave: &(dyn Fn(&Request, usize) -> Reply + Send + Sync)) {
    let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let mut request = Request { target: first.split(' ').nth(1).unwrap().to_owned(), ..Request::default() };
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').unwrap();
        request.headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let (index, earlier) = {
        let mut log = log.lock().unwrap();
        let earlier = log.iter().filter(|other| other.target == request.target).count();
        log.push(request.clone());
        (log.len() - 1, earlier)
    };
    let reply = behave(&request, earlier);
    let mut head = format!("HTTP/1.1 {}\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let mut stream = &stream;
    if stream.write_all(format!("{head}\r\n").as_bytes()).is_err() {
        return;
    }
    for chunk in reply.body.chunks(16 << 10) {
        // A client may go away early: that is what some of the tests are about.
        log.lock().unwrap()[index].sent_bytes += chunk.len();
        if stream.write_all(chunk).is_err() {
            return;
        }
        thread::sleep(reply.pause_per_16_kib);
    }
    thread::sleep(reply.silence);
}
