// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A listening socket of the kubelet's plugin.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Server;
use tracing::warn;

/// Identity of the file at a path; another identity at the same path is another socket.
pub(crate) type FileId = (u64, u64, i64, i64);

/// The identity of the file at a path.
pub(crate) fn id(path: &Path) -> Option<FileId> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino(), found.ctime(), found.ctime_nsec()))
}

/// A plugin's listening socket. Its file is removed at the end, unless replaced.
pub(crate) struct Socket {
    path: PathBuf,
    id: Option<FileId>,
    server: JoinHandle<()>,
}

impl Socket {
    /// Listens at a path in place of another socket, and answers by a service.
    pub(crate) fn open<S>(path: PathBuf, service: S) -> io::Result<Socket>
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let incoming = UnixListenerStream::new(UnixListener::bind(&path)?);
        let server = tokio::spawn(async move {
            if let Err(error) = Server::builder().serve_with_incoming(service, incoming).await {
                warn!(%error, "the plugin's server has ended");
            }
        });
        Ok(Socket { id: id(&path), path, server })
    }

    /// Whether the file is there, and is listened to.
    pub(crate) fn is_there(&self) -> bool {
        self.id.is_some() && id(&self.path) == self.id && !self.server.is_finished()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
        self.server.abort();
    }
}
