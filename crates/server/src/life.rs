//! The life of a server: it takes connections, is told to stop, finishes what it accepted, and ends.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::connection::{self, Connection, Connections};
use crate::turns::Turns;

/// How often it is looked whether all turns are over.
const LOOK: Duration = Duration::from_millis(50);

/// Serves until `stop` comes. Then no more turns and connections are taken, those that were accepted have `grace` to end, and what is
/// left is cut.
///
/// # Errors
/// If the listener fails.
pub async fn serve(
    turns: Arc<dyn Turns>,
    router: Router,
    listener: TcpListener,
    grace: Duration,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (stopping, stopped) = watch::channel(false);
    let own = Arc::clone(&turns);
    let told = tokio::spawn(async move {
        stop.await;
        own.drain();
        // Nobody may listen any more if the server failed.
        let _ = stopping.send(true);
    });
    let mut closing = stopped.clone();
    let turns_of_connections = Arc::clone(&turns);
    let router = router.layer(axum::middleware::from_fn(connection::follow));
    let service = router.into_make_service_with_connect_info::<Connection>();
    let listener = Connections { listener, turns: turns_of_connections };
    let server = axum::serve(listener, service).with_graceful_shutdown(async move {
        let _ = closing.wait_for(|stop| *stop).await;
    });
    let mut ending = stopped;
    let cut = async {
        let _ = ending.wait_for(|stop| *stop).await;
        let deadline = tokio::time::Instant::now() + grace;
        while turns.in_progress() > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(LOOK).await;
        }
        let left = turns.in_progress();
        if left > 0 {
            tracing::warn!(left, "turns are cut: they took longer than the grace time");
        }
        // Connections that say nothing more have a moment to notice.
        tokio::time::sleep(LOOK).await;
    };
    let result = tokio::select! {
        result = server.into_future() => result,
        () = cut => Ok(()),
    };
    told.abort();
    let last = Arc::clone(&turns);
    tokio::task::spawn_blocking(move || last.stop()).await.map_err(io::Error::other)?;
    result
}
