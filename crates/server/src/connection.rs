//! Connections that know when what tokens gave is written: the end of the way on which the server costs time.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use crate::turns::{TokenAt, Turns};

/// When the tokens were where that a stream has handed over and that are not written.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unwritten(Arc<Mutex<Vec<TokenAt>>>);

impl Unwritten {
    pub(crate) fn add(&self, tokens_at: Vec<TokenAt>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(tokens_at);
    }

    fn take(&self) -> Vec<TokenAt> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a connection answers now.
#[derive(Clone, Default)]
pub(crate) struct Connection(Arc<Mutex<Option<Unwritten>>>);

/// The layer that tells the connection which stream it writes.
pub(crate) async fn follow(request: Request, next: Next) -> Response {
    let connection = request.extensions().get::<ConnectInfo<Connection>>().cloned();
    let response = next.run(request).await;
    if let Some(ConnectInfo(Connection(current))) = connection {
        *current.lock().unwrap_or_else(PoisonError::into_inner) = response.extensions().get::<Unwritten>().cloned();
    }
    response
}

/// Takes connections.
pub(crate) struct Connections {
    pub(crate) listener: TcpListener,
    pub(crate) turns: Arc<dyn Turns>,
}

impl Listener for Connections {
    type Io = Watched;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Watched, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.listener).await;
        // Tokens are small, and the system would hold each back until the one before is acknowledged, up to 40 ms.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection will be slow");
        }
        (Watched { stream, turns: Arc::clone(&self.turns), current: Connection::default() }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Connected<IncomingStream<'_, Connections>> for Connection {
    fn connect_info(stream: IncomingStream<'_, Connections>) -> Connection {
        stream.io().current.clone()
    }
}

/// A connection that is watched while it is written to.
pub(crate) struct Watched {
    stream: TcpStream,
    turns: Arc<dyn Turns>,
    current: Connection,
}

impl Watched {
    /// A stream hands over a part when the one before is written, so that what is written is what was handed over.
    fn wrote(&self, result: &Poll<io::Result<usize>>) {
        if matches!(result, Poll::Ready(Ok(bytes)) if *bytes > 0) {
            let current = self.current.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            for token in current.iter().flat_map(Unwritten::take) {
                self.turns.written(token);
            }
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.wrote(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.wrote(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
