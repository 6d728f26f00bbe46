// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Addresses on the command line: one form for all commands.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};

use clap::Args;

use crate::error::CliError;

/// The server that a command connects to.
#[derive(Args, Debug)]
pub(crate) struct ServerArgs {
    /// The server: HOST:PORT, with an IPv6 address in brackets. HOST and PORT may be two arguments.
    #[arg(value_name = "HOST:PORT")]
    server: String,

    #[arg(value_name = "PORT", hide = true)]
    port: Option<u16>,
}

/// A host's name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// Without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl ServerArgs {
    /// The server named by the arguments.
    ///
    /// # Errors
    /// [`CliError::Server`]: there is no host or no port, or the port is no number up to 65535.
    pub(crate) fn server(&self) -> Result<Server, CliError> {
        match self.port {
            Some(port) => Ok(Server { host: without_brackets(&self.server).into(), port }),
            None => parse_server(&self.server),
        }
    }
}

impl Server {
    /// Resolves the name.
    ///
    /// # Errors
    /// [`CliError::Unknown`].
    pub(crate) fn resolve(&self) -> Result<Vec<SocketAddr>, CliError> {
        let unknown = |why: String| CliError::Unknown { host: self.host.clone(), why };
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let found: Vec<_> = found.map_err(|error| unknown(error.to_string()))?.collect();
        if found.is_empty() { Err(unknown("it has no address".into())) } else { Ok(found) }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Reads `HOST:PORT`. An IPv6 address has to be in brackets: without them its end looks like a port.
///
/// # Errors
/// [`CliError::Server`].
pub(crate) fn parse_server(text: &str) -> Result<Server, CliError> {
    let wrong = || CliError::Server(text.into());
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let bare = without_brackets(host);
    if bare.is_empty() || (bare.contains(':') && bare.len() == host.len()) {
        return Err(wrong());
    }
    Ok(Server { host: bare.into(), port: port.parse().map_err(|_| wrong())? })
}

/// Reads where to listen: `HOST:PORT`, `:PORT` or `PORT`. Without a host these are all addresses of
/// IPv6 and of IPv4.
///
/// # Errors
/// [`CliError::Address`]: none of these forms. [`CliError::Unknown`]: a name without an address.
pub(crate) fn parse_listen(text: &str) -> Result<Vec<SocketAddr>, CliError> {
    let port = text.strip_prefix(':').unwrap_or(text);
    if let Ok(port) = port.parse::<u16>() {
        return Ok(vec![SocketAddr::from(([0; 8], port)), SocketAddr::from(([0; 4], port))]);
    }
    parse_server(text).map_err(|_| CliError::Address(text.into()))?.resolve()
}

fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(host: &str, port: u16) -> Server {
        Server { host: host.into(), port }
    }

    #[test]
    fn a_server_is_a_host_and_a_port() {
        for (text, expected) in [
            ("localhost:5000", server("localhost", 5000)),
            ("127.0.0.1:0", server("127.0.0.1", 0)),
            ("[::1]:7", server("::1", 7)),
            ("[fe80::1%eth0]:7", server("fe80::1%eth0", 7)),
        ] {
            let read = parse_server(text).unwrap();
            assert_eq!(read, expected);
            assert_eq!(read.to_string(), text);
        }
    }

    #[test]
    fn host_and_port_may_be_two_arguments() {
        for host in ["::1", "[::1]"] {
            let args = ServerArgs { server: host.into(), port: Some(7) };
            assert_eq!(args.server().unwrap(), server("::1", 7));
        }
        let args = ServerArgs { server: "localhost:7".into(), port: None };
        assert_eq!(args.server().unwrap(), server("localhost", 7));
    }

    #[test]
    fn refuses_servers_without_host_or_port() {
        for text in ["", ":", "x", "5000", ":5000", "x:", "x:70000", "x:y", "::1", "::1:7", "[]:7"]
        {
            assert!(matches!(parse_server(text), Err(CliError::Server(_))), "{text}");
        }
    }

    #[test]
    fn one_may_listen_on_a_port_of_all_addresses() {
        for text in ["5000", ":5000"] {
            let all = parse_listen(text).unwrap();
            assert!(all.iter().all(|a| a.port() == 5000 && a.ip().is_unspecified()), "{text}");
        }
        assert_eq!(parse_listen("127.0.0.1:0").unwrap()[0].to_string(), "127.0.0.1:0");
        assert_eq!(parse_listen("[::1]:7").unwrap()[0].to_string(), "[::1]:7");
        for text in ["", ":", "x", "70000", "127.0.0.1", "127.0.0.1:x", "::1"] {
            assert!(matches!(parse_listen(text), Err(CliError::Address(_))), "{text}");
        }
    }
}
