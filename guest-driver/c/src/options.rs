// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Socket options and addresses.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::time::Duration;

use guest_driver::KeepAlive;

use crate::error::Error;
use crate::socket::Socket;

const SOCKET: c_int = libc::SOL_SOCKET;
const TCP: c_int = libc::IPPROTO_TCP;
/// Microseconds of a second.
const SECOND: u64 = 1_000_000;

fn unknown(level: c_int, name: c_int) -> Error {
    Error::new(libc::ENOPROTOOPT, format!("the option {name} of level {level}"))
}

/// The first bytes of a value.
fn field<const N: usize>(value: &[u8], at: usize) -> Result<[u8; N], Error> {
    let bytes = value.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().ok_or_else(|| {
        Error::new(libc::EINVAL, format!("{} bytes of a value are too few", value.len()))
    })
}

fn int(value: &[u8], at: usize) -> Result<c_int, Error> {
    field(value, at).map(c_int::from_ne_bytes)
}

/// A `struct timeval`; zero: no time-out.
fn timeout(value: &[u8]) -> Result<Option<Duration>, Error> {
    let [seconds, micros] = [field(value, 0)?, field(value, 8)?].map(i64::from_ne_bytes);
    let time = u64::try_from(seconds).ok().zip(u64::try_from(micros).ok());
    match time.filter(|(_, micros)| *micros < SECOND) {
        Some((0, 0)) => Ok(None),
        Some((seconds, micros)) => {
            Ok(Some(Duration::from_secs(seconds) + Duration::from_micros(micros)))
        }
        None => Err(Error::new(libc::EDOM, format!("a time of {seconds} s and {micros} us"))),
    }
}

fn timeval(timeout: Option<Duration>) -> Vec<u8> {
    let timeout = timeout.unwrap_or_default();
    let fields = [timeout.as_secs() as i64, i64::from(timeout.subsec_micros())];
    fields.into_iter().flat_map(i64::to_ne_bytes).collect()
}

/// Sets an option.
///
/// # Errors
/// As `smc_setsockopt`.
pub(crate) fn set(socket: &Socket, level: c_int, name: c_int, value: &[u8]) -> Result<(), Error> {
    let stream = socket.stream()?;
    match (level, name) {
        (SOCKET, libc::SO_RCVTIMEO) => stream.set_read_timeout(timeout(value)?)?,
        (SOCKET, libc::SO_SNDTIMEO) => stream.set_write_timeout(timeout(value)?)?,
        (SOCKET, libc::SO_LINGER) => {
            let (on, seconds) = (int(value, 0)? != 0, int(value, 4)?);
            let seconds = u64::try_from(seconds)
                .map_err(|_| Error::new(libc::EDOM, format!("a time of {seconds} s")))?;
            stream.set_linger(on.then(|| Duration::from_secs(seconds)))?;
        }
        (SOCKET, libc::SO_KEEPALIVE) => {
            let on = int(value, 0)? != 0;
            stream.set_keepalive(on.then(KeepAlive::default))?;
        }
        (SOCKET, libc::SO_OOBINLINE) => stream.set_oob_inline(int(value, 0)? != 0)?,
        (TCP, libc::TCP_NODELAY) => stream.set_nodelay(int(value, 0)? != 0)?,
        _ => return Err(unknown(level, name)),
    }
    Ok(())
}

/// Reads an option.
///
/// # Errors
/// As `smc_getsockopt`.
pub(crate) fn get(socket: &Socket, level: c_int, name: c_int) -> Result<Vec<u8>, Error> {
    let stream = socket.stream()?;
    let number = |value: c_int| value.to_ne_bytes().to_vec();
    Ok(match (level, name) {
        (SOCKET, libc::SO_RCVTIMEO) => timeval(stream.read_timeout()?),
        (SOCKET, libc::SO_SNDTIMEO) => timeval(stream.write_timeout()?),
        (SOCKET, libc::SO_KEEPALIVE) => number(stream.keepalive()?.is_some().into()),
        (SOCKET, libc::SO_ERROR) => {
            number(stream.take_error()?.map_or(0, |error| Error::from(error).code()))
        }
        (TCP, libc::TCP_NODELAY) => number(stream.nodelay()?.into()),
        _ => return Err(unknown(level, name)),
    })
}

/// A `struct sockaddr_in` or `sockaddr_in6`.
pub(crate) fn sockaddr(address: SocketAddr) -> Vec<u8> {
    let family = |family: c_int| (family as libc::sa_family_t).to_ne_bytes();
    let port = address.port().to_be_bytes();
    match address {
        SocketAddr::V4(v4) => {
            let ip = v4.ip().octets();
            [&family(libc::AF_INET)[..], &port, &ip, &[0; 8]].concat()
        }
        SocketAddr::V6(v6) => {
            let (flow, scope) = (v6.flowinfo().to_be_bytes(), v6.scope_id().to_ne_bytes());
            [&family(libc::AF_INET6)[..], &port, &flow, &v6.ip().octets(), &scope].concat()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_checked_and_come_back() {
        let value = |seconds: i64, micros: i64| {
            [seconds, micros].into_iter().flat_map(i64::to_ne_bytes).collect::<Vec<u8>>()
        };
        assert_eq!(timeout(&value(0, 0)).unwrap(), None);
        let time = timeout(&value(2, 5)).unwrap();
        assert_eq!(time, Some(Duration::from_micros(2_000_005)));
        assert_eq!(timeval(time), value(2, 5));
        for (seconds, micros) in [(-1, 0), (0, -1), (0, 1_000_000)] {
            let error = timeout(&value(seconds, micros)).unwrap_err();
            assert_eq!(error.code(), libc::EDOM);
        }
        assert_eq!(timeout(&value(0, 0)[..15]).unwrap_err().code(), libc::EINVAL);
    }

    #[test]
    fn addresses_have_the_bytes_of_the_structs_of_c() {
        let v4 = sockaddr("1.2.3.4:258".parse().unwrap());
        let [first, second] = 2u16.to_ne_bytes();
        assert_eq!(v4, [first, second, 1, 2, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0]);
        let v6 = sockaddr("[::5%3]:258".parse().unwrap());
        assert_eq!(v6.len(), size_of::<libc::sockaddr_in6>());
        assert_eq!((v6[23], &v6[24..]), (5, &3u32.to_ne_bytes()[..]));
    }
}
