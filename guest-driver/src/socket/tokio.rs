// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `SmcStream` and `SmcListener` as tokio objects (feature `tokio`).
//!
//! Readiness comes through the pollable descriptor, so any number of connections share tokio's
//! reactor. The handshake of a client runs on tokio's blocking pool.

use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ::tokio::io::unix::AsyncFd;
use ::tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

use super::{ConnectionInfo, SmcListener, SmcStream, Stack};

/// An [`SmcStream`] for tokio.
#[derive(Debug)]
pub struct AsyncSmcStream {
    // Before the stream: it leaves the reactor first.
    ready: AsyncFd<OwnedFd>,
    stream: SmcStream,
}

impl AsyncSmcStream {
    /// Takes over a connection, which becomes non-blocking.
    ///
    /// # Errors
    /// No descriptors are left; there is no tokio runtime with IO.
    pub fn new(stream: SmcStream) -> io::Result<AsyncSmcStream> {
        stream.set_nonblocking(true)?;
        let fd = stream.pollable()?.try_clone_to_owned()?;
        // Deprecated in favour of an unsafe constructor for descriptors of unknown origin; an
        // `OwnedFd` keeps the promise that it asks for.
        #[allow(deprecated, reason = "see above")]
        let ready = AsyncFd::new(fd)?;
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

    /// What was negotiated.
    pub fn info(&self) -> ConnectionInfo {
        self.stream.info()
    }

    /// The connection itself.
    pub fn get_ref(&self) -> &SmcStream {
        &self.stream
    }
}

impl AsyncRead for AsyncSmcStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.ready.poll_read_ready(cx))?;
            match self.stream.recv(buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncSmcStream {
    fn poll_send(
        &self,
        cx: &mut Context<'_>,
        mut send: impl FnMut(&SmcStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.ready.poll_write_ready(cx))?;
            match send(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncWrite for AsyncSmcStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(cx, |stream| stream.send(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        use std::io::Write;
        self.poll_send(cx, |mut stream| stream.write_vectored(bufs))
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
        // As above.
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

    /// The address that is listened on.
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
