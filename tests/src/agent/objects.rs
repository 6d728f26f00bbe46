// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A test's stacks, listeners and streams at the far end.

use std::collections::HashMap;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{DeviceAddress, SmcListener, SmcStream, Stack};
use serde::Serialize;
use serde_json::Value;

use super::wire::{Call, Failure, How, Nature, Op};
use super::{lock, open};
use crate::watch::test_timeout;

/// The objects of one test.
#[derive(Default)]
pub(super) struct Objects {
    table: Mutex<Table>,
    next: AtomicU64,
}

#[derive(Default)]
struct Table {
    /// The test has ended.
    closed: bool,
    objects: HashMap<u64, Object>,
    /// Every stack ever opened by the test.
    stacks: Vec<Weak<Stack>>,
}

enum Object {
    Stack(Arc<Stack>),
    Listener(Arc<SmcListener>),
    Stream(Arc<SmcStream>),
}

/// A value and the bytes behind the value.
type Result = io::Result<(Value, Vec<u8>)>;

fn value(value: impl Serialize) -> Result {
    Ok((serde_json::to_value(value)?, Vec::new()))
}

fn gone() -> io::Error {
    io::Error::other("the far end does not have this object")
}

impl Objects {
    /// Executes a call. On return the call holds no object any more, so a following drop is the last
    /// one.
    pub(super) fn execute(&self, call: Call, bytes: Vec<u8>, own: &DeviceAddress) -> Result {
        match call {
            Call::Begin { .. } | Call::Join { .. } => Err(ErrorKind::InvalidInput.into()),
            Call::End => value(self.clear()?),
            Call::Open(settings) => {
                let stack = open(&settings.config(own)?)?;
                lock(&self.table).stacks.push(Arc::downgrade(&stack));
                value(self.insert(Object::Stack(stack))?)
            }
            Call::Listen { stack, addr } => {
                let listener = SmcListener::bind(&self.stack(stack)?, addr)?;
                let addr = listener.local_addr()?;
                value((self.insert(Object::Listener(Arc::new(listener)))?, addr))
            }
            Call::Connect { stack, addr, how } => {
                let stream = connect(&self.stack(stack)?, &addr, how)?;
                value(self.insert(Object::Stream(Arc::new(stream)))?)
            }
            Call::Accept { listener } => {
                let (stream, from) = self.listener(listener)?.accept()?;
                value((self.insert(Object::Stream(Arc::new(stream)))?, from))
            }
            Call::ListenerNonblocking { listener, nonblocking } => {
                value(self.listener(listener)?.set_nonblocking(nonblocking)?)
            }
            Call::Totals { stack } => value(self.stack(stack)?.totals()),
            Call::Devices { stack } => {
                let devices = self.stack(stack)?.devices();
                value(devices.iter().map(|(chid, gid)| (chid.0, gid.0)).collect::<Vec<_>>())
            }
            Call::Stream { stream, op: Op::Clone } => {
                let clone = self.stream(stream)?.try_clone()?;
                value(self.insert(Object::Stream(Arc::new(clone)))?)
            }
            Call::Stream { stream, op } => apply(&*self.stream(stream)?, op, &bytes),
            Call::Drop { object } => {
                let object = lock(&self.table).objects.remove(&object);
                drop(object.ok_or_else(gone)?);
                value(())
            }
        }
    }

    fn insert(&self, object: Object) -> io::Result<u64> {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        let mut table = lock(&self.table);
        if table.closed {
            drop(table);
            drop(object);
            return Err(io::Error::other("the test has ended"));
        }
        table.objects.insert(key, object);
        Ok(key)
    }

    fn stack(&self, key: u64) -> io::Result<Arc<Stack>> {
        match lock(&self.table).objects.get(&key) {
            Some(Object::Stack(stack)) => Ok(stack.clone()),
            _ => Err(gone()),
        }
    }

    fn listener(&self, key: u64) -> io::Result<Arc<SmcListener>> {
        match lock(&self.table).objects.get(&key) {
            Some(Object::Listener(listener)) => Ok(listener.clone()),
            _ => Err(gone()),
        }
    }

    fn stream(&self, key: u64) -> io::Result<Arc<SmcStream>> {
        match lock(&self.table).objects.get(&key) {
            Some(Object::Stream(stream)) => Ok(stream.clone()),
            _ => Err(gone()),
        }
    }

    /// Drops every object, also from under blocked calls, and waits for the devices to become free.
    ///
    /// # Errors
    /// If the devices do not become free.
    pub(super) fn clear(&self) -> io::Result<()> {
        let (objects, stacks) = {
            let mut table = lock(&self.table);
            table.closed = true;
            (std::mem::take(&mut table.objects), std::mem::take(&mut table.stacks))
        };
        for object in objects.values() {
            match object {
                Object::Stack(_) => {}
                Object::Listener(listener) => {
                    let _ = listener.set_nonblocking(true);
                    // An `accept` may still wait here: a connection ends the wait.
                    let _ = listener.local_addr().and_then(TcpStream::connect);
                }
                Object::Stream(stream) => {
                    // Do not wait for the leftovers of a test.
                    let _ = stream.set_linger(Some(Duration::ZERO));
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
        }
        drop(objects);
        let start = Instant::now();
        while stacks.iter().any(|stack| stack.strong_count() > 0) {
            if start.elapsed() > test_timeout() {
                return Err(io::Error::other("a stack is still in use after its test"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn connect(stack: &Arc<Stack>, addr: &SocketAddr, how: How) -> io::Result<SmcStream> {
    match how {
        How::Smc => SmcStream::connect(stack, addr),
        How::Within(limit) => SmcStream::connect_timeout(stack, addr, limit),
        How::Tcp => SmcStream::connect_tcp(stack, addr),
        How::Upgrade => SmcStream::upgrade(stack, TcpStream::connect(addr)?, None),
    }
}

/// Reads at most `len` bytes by `read`.
fn bytes(len: usize, read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> Result {
    let mut bytes = vec![0; len];
    let n = read(&mut bytes)?;
    bytes.truncate(n);
    Ok((n.into(), bytes))
}

fn apply(mut stream: &SmcStream, op: Op, data: &[u8]) -> Result {
    match op {
        Op::Recv(len) => bytes(len, |buf| stream.recv(buf)),
        Op::Peek(len) => bytes(len, |buf| stream.peek(buf)),
        Op::Send => value(stream.send(data)?),
        Op::WriteAll => value(stream.write_all(data)?),
        Op::ReadVectored(lens) => {
            let mut parts: Vec<_> = lens.into_iter().map(|len| vec![0; len]).collect();
            let mut slices: Vec<_> = parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
            let n = stream.read_vectored(&mut slices)?;
            let mut bytes = parts.concat();
            bytes.truncate(n);
            Ok((n.into(), bytes))
        }
        Op::WriteVectored(lens) => {
            let (mut rest, mut slices) = (data, Vec::new());
            for len in lens {
                let (part, more) = rest.split_at_checked(len).ok_or(ErrorKind::InvalidData)?;
                slices.push(IoSlice::new(part));
                rest = more;
            }
            value(stream.write_vectored(&slices)?)
        }
        Op::SendUrgent(byte) => value(stream.send_urgent(byte)?),
        Op::RecvUrgent => value(stream.recv_urgent()?),
        Op::HasUrgent => value(stream.has_urgent()?),
        Op::AtMark => value(stream.at_mark()?),
        Op::SetOobInline(inline) => value(stream.set_oob_inline(inline)?),
        Op::Readable => value(stream.readable()?),
        Op::UnreadByPeer => value(stream.unread_by_peer()),
        Op::Shutdown { read, write } => match Op::how(read, write) {
            Some(how) => value(stream.shutdown(how)?),
            None => Err(ErrorKind::InvalidInput.into()),
        },
        Op::SetNonblocking(nonblocking) => value(stream.set_nonblocking(nonblocking)?),
        Op::SetReadTimeout(limit) => value(stream.set_read_timeout(limit)?),
        Op::SetWriteTimeout(limit) => value(stream.set_write_timeout(limit)?),
        Op::ReadTimeout => value(stream.read_timeout()?),
        Op::WriteTimeout => value(stream.write_timeout()?),
        Op::SetLinger(linger) => value(stream.set_linger(linger)?),
        Op::SetNodelay(nodelay) => value(stream.set_nodelay(nodelay)?),
        Op::Nodelay => value(stream.nodelay()?),
        Op::SetTtl(ttl) => value(stream.set_ttl(ttl)?),
        Op::Ttl => value(stream.ttl()?),
        Op::TakeError => value(stream.take_error()?.as_ref().map(Failure::from)),
        Op::LocalAddr => value(stream.local_addr()?),
        Op::PeerAddr => value(stream.peer_addr()?),
        Op::ConnectionInfo => value(Nature::from(stream.info())),
        // A clone makes an object, see `Objects::execute`.
        Op::Clone => Err(ErrorKind::InvalidInput.into()),
    }
}
