// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets of AF_SMC. Only their making differs from TCP, so the standard library's types serve.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, Protocol, RawProtocol, SocketFlags, SocketType, bind, connect, listen,
    socket_with, sockopt,
};

const FAMILY: AddressFamily = AddressFamily::from_raw(af_smc::FAMILY);
/// SMCPROTO_SMC6; SMCPROTO_SMC of IPv4 is 0.
const OVER_IPV6: RawProtocol = RawProtocol::new(1).unwrap();
/// Connections in a listener's queue.
const BACKLOG: i32 = 256;

fn socket(addr: &SocketAddr) -> io::Result<OwnedFd> {
    let protocol = addr.is_ipv6().then(|| Protocol::from_raw(OVER_IPV6));
    Ok(socket_with(FAMILY, SocketType::STREAM, SocketFlags::CLOEXEC, protocol)?)
}

/// Listens.
///
/// # Errors
/// The kernel's.
pub fn listener(addr: &SocketAddr) -> io::Result<TcpListener> {
    let socket = socket(addr)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, addr)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Connects.
///
/// # Errors
/// The kernel's.
pub fn stream(addr: &SocketAddr) -> io::Result<TcpStream> {
    let socket = socket(addr)?;
    connect(&socket, addr)?;
    Ok(socket.into())
}
