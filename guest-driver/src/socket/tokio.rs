// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `SmcStream` and `SmcListener` as tokio objects (feature `tokio`).
//!
//! A task of the runtime checks shared memory for the runtime's connections, and wakes their waiting
//! tasks (`watcher`). Listeners and TCP connections have a descriptor in tokio's reactor. The handshake
//! of a client runs on tokio's blocking pool.

mod watcher;

use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ::tokio::io::unix::AsyncFd;
use ::tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use ::tokio::task::coop;

use self::watcher::{Direction, Registration};
use super::{ConnectionInfo, SmcListener, SmcStream, Stack};

/// An [`SmcStream`] for tokio. Tasks of any runtime may use the stream, as long as the runtime of its
/// creation exists.
#[derive(Debug)]
pub struct AsyncSmcStream {
    // Before the stream: the registration leaves the reactor first.
    ready: ReadinessSource,
    stream: SmcStream,
}

/// The source of a connection's readiness.
#[derive(Debug)]
enum ReadinessSource {
    /// The runtime's task, from shared memory.
    Watcher(Registration),
    /// The kernel, because the connection is TCP.
    Kernel(AsyncFd<OwnedFd>),
}

impl AsyncSmcStream {
    /// Takes over a connection, which becomes non-blocking.
    ///
    /// # Errors
    /// No descriptors are left; there is no tokio runtime.
    ///
    /// # Panics
    /// The runtime has no IO (`enable_io`).
    pub fn new(stream: SmcStream) -> io::Result<AsyncSmcStream> {
        stream.set_nonblocking(true)?;
        let ready = match Registration::new(&stream)? {
            Some(registration) => ReadinessSource::Watcher(registration),
            None => {
                let fd = stream.pollable()?.try_clone_to_owned()?;
                // Deprecated in favour of an unsafe constructor for descriptors of unknown origin; an
                // `OwnedFd` keeps the required promise.
                #[allow(deprecated, reason = "see above")]
                ReadinessSource::Kernel(AsyncFd::new(fd)?)
            }
        };
        Ok(AsyncSmcStream { ready, stream })
    }

    /// [`SmcStream::connect`] for tokio.
    ///
    /// # Errors
    /// As [`SmcStream::connect`].
    pub async fn connect(stack: &Arc<Stack>, addr: SocketAddr) -> io::Result<AsyncSmcStream> {
        let stack = stack.clone();
        let connecting =
            ::tokio::task::spawn_blocking(move || SmcStream::connect(&stack, addr)).await;
        Self::new(connecting.map_err(io::Error::other)??)
    }

    /// The negotiated values.
    pub fn info(&self) -> ConnectionInfo {
        self.stream.info()
    }

    /// The connection itself.
    pub fn get_ref(&self) -> &SmcStream {
        &self.stream
    }

    /// Calls `act` until it does not have to wait, or registers the task for a wake-up.
    fn poll_io<T>(
        &self,
        cx: &mut Context<'_>,
        direction: Direction,
        mut act: impl FnMut(&SmcStream) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        match &self.ready {
            ReadinessSource::Kernel(fd) => loop {
                let mut guard = ready!(match direction {
                    Direction::Read => fd.poll_read_ready(cx),
                    Direction::Write => fd.poll_write_ready(cx),
                })?;
                match act(&self.stream) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                    done => return Poll::Ready(done),
                }
            },
            ReadinessSource::Watcher(registration) => {
                // The runtime's share of time for a task: others have to run as well.
                let budget = ready!(coop::poll_proceed(cx));
                let mut done = act(&self.stream);
                if would_block(&done) {
                    registration.wake_later(cx, direction)?;
                    done = act(&self.stream);
                    if would_block(&done) {
                        return Poll::Pending;
                    }
                }
                budget.made_progress();
                Poll::Ready(done)
            }
        }
    }
}

fn would_block<T>(done: &io::Result<T>) -> bool {
    matches!(done, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

impl AsyncRead for AsyncSmcStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let into = buf.initialize_unfilled();
        let n = ready!(self.poll_io(cx, Direction::Read, |stream| stream.recv(into)))?;
        buf.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AsyncSmcStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_io(cx, Direction::Write, |stream| stream.send(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        use std::io::Write;
        self.poll_io(cx, Direction::Write, |mut stream| stream.write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.shutdown(Shutdown::Write))
    }
}

/// An [`SmcListener`] for tokio.
#[derive(Debug)]
pub struct AsyncSmcListener {
    ready: AsyncFd<OwnedFd>,
    listener: SmcListener,
}

impl AsyncSmcListener {
    /// Takes over a listener, which becomes non-blocking.
    ///
    /// # Errors
    /// No descriptors are left; there is no tokio runtime with IO.
    pub fn new(listener: SmcListener) -> io::Result<AsyncSmcListener> {
        listener.set_nonblocking(true)?;
        let fd = listener.pollable().try_clone_to_owned()?;
        // As for connections.
        #[allow(deprecated, reason = "see above")]
        let ready = AsyncFd::with_interest(fd, Interest::READABLE)?;
        Ok(AsyncSmcListener { ready, listener })
    }

    /// [`SmcListener::bind`] for tokio.
    ///
    /// # Errors
    /// As [`SmcListener::bind`].
    pub fn bind(stack: &Arc<Stack>, addr: SocketAddr) -> io::Result<AsyncSmcListener> {
        Self::new(SmcListener::bind(stack, addr)?)
    }

    /// The listening address.
    ///
    /// # Errors
    /// As [`SmcListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Takes the next connection.
    ///
    /// # Errors
    /// As [`SmcListener::accept`].
    pub async fn accept(&self) -> io::Result<(AsyncSmcStream, SocketAddr)> {
        loop {
            let mut guard = self.ready.readable().await?;
            match self.listener.accept() {
                Ok((stream, addr)) => return Ok((AsyncSmcStream::new(stream)?, addr)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                Err(error) => return Err(error),
            }
        }
    }
}
